"""Every sync, check, abort and deadline of the durable state, and the source without it.

`mutation_check.py` applies them one at a time and expects some test to fail; `test_mutations.py` keeps the list in
step with the source. Other parts of the package add theirs here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One line of defence taken away."""

    what: str
    file: str
    """Below src/draftline."""
    old: str
    """Text that occurs exactly once."""
    new: str
    tests: str
    """Test files below tests/, space separated, of which at least one test must fail."""


CRASH = "faults/test_crash_points.py"
DAMAGE = "faults/test_damaged_checkpoints.py"
BACKGROUND = "faults/test_background_writes.py"
FULL = "faults/test_disk_full.py"
UNTRUSTED = "faults/test_untrusted_checkpoints.py"
FOLDER = "faults/test_one_run_per_folder.py"
SIGNAL = "faults/test_stop_on_signal.py"
MONITOR = "faults/test_monitor.py"
WATCHDOG = "faults/test_watchdog.py"
RESULT = "faults/test_result_file.py"
POINTS = "faults/test_fault_points.py"
STORE = "faults/test_corrupt_store.py"

ENGINE = "test_pipeline_engine.py"
FAILURES = "test_pipeline_failures.py"
CHANNEL = "test_channel.py"
REDUCE = "test_reduce.py"
SUPERVISE = "test_supervise.py"
FEED = "test_feed.py"
EVALUATOR = "test_evaluator.py"
NOT_FINITE = "faults/test_not_finite.py"
PROCESS = "faults/test_trainer_process.py"
RAISES = "faults/test_worker_raises.py"
FULL_RUN = "faults/test_disk_full_in_a_run.py"
STOP_RUN = "faults/test_stop_in_a_run.py"
KILL_RUN = "faults/test_kill_real_runs.py"
METRICS = "test_metrics_log.py"

WRITE = "checkpoint/write.py"
RESTORE = "checkpoint/restore.py"
MANIFEST = "checkpoint/manifest.py"
SAVER = "checkpoint/checkpointer.py"

SYNCS = [
    Mutation(
        "sync of the tensor files",
        WRITE,
        "        fs.write_tensors(folder / name, tensors)\n        fs.sync_file(folder / name)\n",
        "        fs.write_tensors(folder / name, tensors)\n",
        CRASH,
    ),
    Mutation(
        "sync of the text files",
        WRITE,
        "        fs.write_bytes(folder / name, text.encode())\n        fs.sync_file(folder / name)\n",
        "        fs.write_bytes(folder / name, text.encode())\n",
        CRASH,
    ),
    Mutation("sync of the manifest", WRITE, "    fs.sync_file(folder / MANIFEST)\n", "", CRASH),
    Mutation("sync of the new folder", WRITE, "    fs.sync_folder(folder)\n", "", CRASH),
    Mutation(
        "sync after the rename", WRITE, "        raise\n    fs.sync_folder(root)\n", "        raise\n", CRASH
    ),
    Mutation(
        "sync before deleting",
        WRITE,
        "    fs.sync_folder(root)\n    for name in old",
        "    for name in old",
        CRASH,
    ),
    Mutation("sync of a small file", "resilience/fsio.py", "    fs.sync_file(temporary)\n", "", CRASH),
    Mutation("sync of its new name", "resilience/fsio.py", "    fs.sync_folder(path.parent)\n", "", CRASH),
    Mutation(
        "sync of new parents", "resilience/fsio.py", "        fs.sync_folder(folder.parent)\n", "", CRASH
    ),
    Mutation(
        "fsync itself",
        "resilience/fsio.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        "faults/test_real_syncs.py",
    ),
    Mutation(
        "writing under a temporary name",
        WRITE,
        'temporary = root / f"{TEMPORARY}{os.getpid()}-{snapshot.step}"',
        "temporary = root / checkpoint_name(snapshot.step)",
        CRASH,
    ),
    Mutation(
        "retiring by rename",
        WRITE,
        '        fs.rename(root / name, root / f"{TRASH}{name}")\n',
        '        remove_tree(fs, root / name); fs.make_folder(root / f"{TRASH}{name}")\n',
        CRASH,
    ),
]

CHECKS = [
    Mutation("SHA-256 of files", MANIFEST, "if sha256_hex(data) != entry.sha256:", "if False:", DAMAGE),
    Mutation("size of files", MANIFEST, "if len(data) != entry.bytes:", "if False:", DAMAGE),
    Mutation(
        "seal of the manifest", "resilience/sealed.py", "if not _is_sealed(body, data):", "if False:", DAMAGE
    ),
    Mutation(
        "step of the manifest",
        RESTORE,
        "if checkpoint_name(manifest.step) != folder.name:",
        "if False:",
        DAMAGE,
    ),
    Mutation("the same run", RESTORE, "        require_same_run(manifest, identity, folder)\n", "", DAMAGE),
    Mutation("newer formats", MANIFEST, 'body["format"] > FORMAT:', 'body["format"] > 99:', DAMAGE),
    Mutation(
        "names in the manifest", MANIFEST, "            plain_name(name)\n", "            pass\n", UNTRUSTED
    ),
    Mutation(
        "regular files only",
        "resilience/names.py",
        "if not stat.S_ISREG(status.st_mode):",
        "if False:",
        UNTRUSTED,
    ),
    Mutation("largest size", "resilience/names.py", "if status.st_size > max_bytes:", "if False:", UNTRUSTED),
    Mutation("linked checkpoint", RESTORE, "if folder.is_symlink():", "if False:", UNTRUSTED),
    Mutation("quarantine", RESTORE, "    fs.rename(root / name, place)\n", "", DAMAGE),
    Mutation(
        "no fresh start",
        RESTORE,
        "    if damaged:\n        # They stay",
        "    if False:\n        # They stay",
        DAMAGE,
    ),
    Mutation(
        "newest first",
        RESTORE,
        "in reversed(steps_in(root)):\n        try:",
        "in steps_in(root):\n        try:",
        DAMAGE,
    ),
    Mutation(
        "another run is refused before anything changes",
        "setup.py",
        "    refuse_other_run(config.output / CHECKPOINTS, identity)\n    (config",
        "    (config",
        "test_refused_early.py",
    ),
    Mutation("trouble is not damage", RESTORE, "if error.errno in _BROKEN:", "if True:", DAMAGE),
    Mutation(
        "links are not followed when deleting",
        "resilience/fsio.py",
        "if path.is_symlink() or not",
        "if not",
        UNTRUSTED,
    ),
    Mutation(
        "leftovers are cleared",
        RESTORE,
        "            remove_tree(fs, path)\n",
        "            pass\n",
        BACKGROUND,
    ),
    Mutation("at least keep stay", WRITE, "steps_in(root)[:-keep]", "steps_in(root)[:-1]", BACKGROUND),
    Mutation("the best stays", WRITE, " if step != also_keep]", "]", BACKGROUND),
    Mutation(
        "best that is gone",
        RESTORE,
        "if best is not None and best.step not in",
        "if False and best.step not in",
        BACKGROUND,
    ),
    Mutation("step written twice", SAVER, "if any(step >= snapshot.step for", "if any(False for", BACKGROUND),
    Mutation("free space", "resilience/fsio.py", "if free < 2 * size:", "if False:", FULL),
    Mutation(
        "secrets in manifests",
        MANIFEST,
        "canonical(redact(self.config))",
        "canonical(dict(self.config))",
        RESULT,
    ),
    Mutation(
        "secrets in results",
        "resilience/result.py",
        'redact(result.model_dump(mode="json"))',
        'result.model_dump(mode="json")',
        RESULT,
    ),
    Mutation("readable weights", "checkpoint/files.py", "        path.chmod(mode)\n", "", BACKGROUND),
    Mutation(
        "faults fire once",
        "resilience/faults.py",
        "                    self._waiting.remove(fault)\n",
        "",
        POINTS,
    ),
    Mutation(
        "hash of a shard",
        "data/integrity.py",
        '    if found == shard["sha256"]:\n',
        "    if True:\n",
        STORE,
    ),
    Mutation(
        "shards left out are part of the run",
        "setup.py",
        '        identity["left_out"] = [damage.path.name for damage in store.damages]\n',
        "        pass\n",
        STORE,
    ),
    Mutation(
        "a run's own store is checked",
        "setup.py",
        "    damaged = _is_damaged(out, screen)\n",
        "    damaged = False\n",
        STORE,
    ),
]

ABORTS = [
    Mutation(
        "error of a background write",
        SAVER,
        "            self._failure = error\n",
        "            del error\n",
        BACKGROUND,
    ),
    Mutation(
        "error at the next step",
        SAVER,
        "        if self._failure is not None:\n",
        "        if False:\n",
        BACKGROUND,
    ),
    Mutation("error when leaving", SAVER, "            raise late\n", "            return\n", BACKGROUND),
    Mutation(
        "first cause kept",
        SAVER,
        "        if error is None:\n            raise late",
        "        if True:\n            raise late",
        BACKGROUND,
    ),
    Mutation(
        "temporary folder after ENOSPC",
        WRITE,
        "            remove_tree(fs, temporary)\n",
        "            pass\n",
        FULL,
    ),
    Mutation("disk full is told", "resilience/fsio.py", "if error.errno in _FULL:", "if False:", FULL),
    Mutation(
        "errno of safetensors",
        "checkpoint/files.py",
        "        raise OSError(int(code[1])",
        "        raise ValueError(int(code[1])",
        FULL,
    ),
    Mutation(
        "lock of the folder",
        "resilience/folder.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        FOLDER,
    ),
    Mutation(
        "owner on another host",
        "resilience/folder.py",
        "            _require_no_distant_owner(self.path, self._owner.host, self._beat_s)\n",
        "",
        FOLDER,
    ),
    Mutation(
        "heartbeat of the owner",
        "resilience/folder.py",
        "                os.utime(self.path / OWNER)\n",
        "                pass\n",
        FOLDER,
    ),
    Mutation(
        "lock not inherited by forks", "resilience/folder.py", "        _held.add(descriptor)\n", "", FOLDER
    ),
    Mutation(
        "signal sets the flag",
        "resilience/signals.py",
        "        self._signal = signal.Signals(number)\n",
        "",
        SIGNAL,
    ),
    Mutation(
        "second signal", "resilience/signals.py", "            os._exit(1)\n", "            return\n", SIGNAL
    ),
    Mutation(
        "handlers restored",
        "resilience/signals.py",
        "            signal.signal(number, handler)\n",
        "            pass\n",
        SIGNAL,
    ),
    Mutation(
        "dead monitor",
        "resilience/monitor.py",
        "        os.kill(os.getpid(), signal.SIGTERM)\n",
        "        return\n",
        MONITOR,
    ),
    Mutation(
        "signals passed on",
        "resilience/monitor.py",
        "        else:\n            self._process.send_signal(number)\n",
        "",
        MONITOR,
    ),
    Mutation("own session", "resilience/monitor.py", "            start_new_session=True,\n", "", MONITOR),
    Mutation(
        "children killed",
        "resilience/monitor.py",
        "            os.killpg(self._process.pid, signal.SIGKILL)",
        "            pass",
        MONITOR,
    ),
    Mutation(
        "stacks before the kill",
        "resilience/monitor.py",
        "            self._process.send_signal(signal.SIGUSR1)",
        "            pass",
        MONITOR,
    ),
    Mutation(
        "signal that killed the trainer",
        "resilience/monitor.py",
        "    if child.code < 0:\n",
        "    if False:\n",
        MONITOR,
    ),
]

DEADLINES = [
    Mutation(
        "deadline of a write",
        SAVER,
        "self._thread.join(max(0.0, self._deadline - time.monotonic()))",
        "self._thread.join()",
        BACKGROUND,
    ),
    Mutation(
        "stall of a worker",
        "resilience/watchdog.py",
        "if now - beat.since > (beat.patience_s or timeout_s)]",
        "if False]",
        WATCHDOG,
    ),
    Mutation(
        "stall of the trainer",
        "resilience/monitor.py",
        "if time.monotonic() > heard + silence_s:",
        "if False:",
        MONITOR,
    ),
    Mutation(
        "stuck after two signals",
        "resilience/monitor.py",
        "if time.monotonic() > self._kill_at:",
        "if False:",
        MONITOR,
    ),
]

ABORT = "pipeline/supervise.py"
THREADS = "pipeline/engine.py"

PIPELINE = [
    Mutation(
        "abort ends a wait",
        ABORT,
        "        while not ready():\n            self.check()\n",
        "        while not ready():\n",
        f"{CHANNEL} {REDUCE} {SUPERVISE}",
    ),
    Mutation(
        "abort stops who need not wait",
        ABORT,
        "                self._wait(condition, ready, seconds, what)\n        self.check()\n",
        "                self._wait(condition, ready, seconds, what)\n",
        f"{CHANNEL} {SUPERVISE}",
    ),
    Mutation(
        "abort wakes waiters",
        ABORT,
        "                condition.notify_all()\n",
        "                pass\n",
        SUPERVISE,
    ),
    Mutation(
        "abort knows its waiters",
        ABORT,
        "            self._conditions.append(condition)\n",
        "            pass\n",
        SUPERVISE,
    ),
    Mutation(
        "a failure aborts the others",
        ABORT,
        "            self.failures.append(Failure(worker, error))\n        self.abort.raise_now()\n",
        "            self.failures.append(Failure(worker, error))\n",
        SUPERVISE,
    ),
    Mutation(
        "a worker's error is recorded",
        ABORT,
        "            self.fail(name, error)\n",
        "            pass\n",
        FAILURES,
    ),
    Mutation(
        "deadline of every wait",
        ABORT,
        "            if left <= 0:\n",
        "            if False:\n",
        f"{SUPERVISE} {CHANNEL}",
    ),
    Mutation(
        "waits tell the watchdog",
        ABORT,
        "with self.watchdog.waiting(threading.current_thread().name, what, patience_s):",
        "if True:",
        FAILURES,
    ),
    Mutation(
        "abort reaches the channel",
        "pipeline/channel.py",
        "self._condition = abort.condition()",
        "self._condition = Abort().condition()",
        CHANNEL,
    ),
    Mutation(
        "abort reaches the reducer's meetings",
        "pipeline/reduce.py",
        "self._condition = abort.condition()",
        "self._condition = Abort().condition()",
        REDUCE,
    ),
    Mutation(
        "abort reaches the loader",
        "data/feed.py",
        "self._condition = abort.condition()",
        "self._condition = Abort().condition()",
        FEED,
    ),
    Mutation(
        "abort reaches those who are built",
        THREADS,
        "self._go = self.abort.condition()",
        "self._go = Abort().condition()",
        FAILURES,
    ),
    Mutation(
        "abort reaches those who wait for the disk",
        THREADS,
        "self._boundary = self.abort.condition()",
        "self._boundary = Abort().condition()",
        FAILURES,
    ),
    Mutation(
        "abort at the end of every run",
        THREADS,
        "            self.abort.raise_now()\n            self._supervisor.join(LEAVE_S)\n",
        "            self._supervisor.join(LEAVE_S)\n",
        FAILURES,
    ),
    Mutation(
        "deadline of the channel",
        "pipeline/channel.py",
        "                lambda: index in self._published,\n                self._seconds,\n",
        "                lambda: index in self._published,\n                1e6,\n",
        CHANNEL,
    ),
    Mutation(
        "deadline of a slot",
        "pipeline/channel.py",
        "                lambda: order < self._num_released + len(self._slots),\n                self._seconds,\n",
        "                lambda: order < self._num_released + len(self._slots),\n                1e6,\n",
        CHANNEL,
    ),
    Mutation(
        "deadline of a meeting",
        "pipeline/reduce.py",
        "lambda: self._round > here, self._seconds,",
        "lambda: self._round > here, 1e6,",
        REDUCE,
    ),
    Mutation(
        "deadline of the loader's rows",
        "data/feed.py",
        "lambda: index in self._built, seconds,",
        "lambda: index in self._built, 1e6,",
        FEED,
    ),
    Mutation(
        "deadlines that need no reader",
        THREADS,
        "self._wait_s = 2 * job.deadlines.stall_timeout_s",
        "self._wait_s = 1e6",
        FAILURES,
    ),
    Mutation(
        "stall while workers start",
        THREADS,
        "            self._require_progress(self.job.deadlines.startup_timeout_s)\n",
        "",
        FAILURES,
    ),
    Mutation(
        "stall while workers run",
        THREADS,
        "            self._require_progress(self.job.deadlines.stall_timeout_s)\n",
        "",
        FAILURES,
    ),
    Mutation(
        "slots are granted in row order",
        "pipeline/channel.py",
        "order < self._num_released + len(self._slots)",
        "True",
        CHANNEL,
    ),
    Mutation(
        "a row waits for the update before it",
        "drafter/worker.py",
        "                self._member.await_update()",
        "                pass",
        ENGINE,
    ),
    Mutation(
        "an update has a place of its own",
        "drafter/worker.py",
        "        with self._member.updating():",
        "        if True:",
        ENGINE,
    ),
    Mutation(
        "drafters wait for a safe state",
        THREADS,
        "lambda: self._is_safe() and all(",
        "lambda: all(",
        ENGINE,
    ),
    Mutation(
        "drafters wait for the reader",
        THREADS,
        "self._is_safe() and all(other >= steps_done for other in self._on_the_way)",
        "self._is_safe()",
        ENGINE,
    ),
    Mutation(
        "meeting before the sums",
        "pipeline/reduce.py",
        '        self._meeting.meet(own.device, "the end of the rows")\n',
        "",
        REDUCE,
    ),
    Mutation(
        "meeting before the norm",
        "pipeline/reduce.py",
        '        self._meeting.meet(own.device, "the gradient norm")\n',
        "",
        REDUCE,
    ),
    Mutation(
        "meeting before the copies",
        "pipeline/reduce.py",
        '        self._meeting.meet(own.device, "the update")\n',
        "",
        REDUCE,
    ),
]

RUN = [
    Mutation(
        "finite check",
        "drafter/worker.py",
        "        if figures.isfinite().all():\n",
        "        if True:\n",
        FAILURES,
    ),
    Mutation(
        "update withheld",
        "optim.py",
        "torch.maximum(self.found_inf, 1.0 - torch.isfinite(norm).float())",
        "torch.zeros_like(self.found_inf)",
        "test_optim.py",
    ),
    Mutation(
        "nothing learned after a bad step",
        "optim.py",
        "torch.maximum(self.found_inf, 1.0 - torch.isfinite(norm).float())",
        "1.0 - torch.isfinite(norm).float()",
        "test_optim.py",
    ),
    Mutation(
        "rows of a bad step are marked",
        "drafter/worker.py",
        "            self._member.mark(index - first)\n",
        "",
        FAILURES,
    ),
    Mutation(
        "a bad step is saved", "drafter/worker.py", "        self._on_bad_step(record.step)\n", "", NOT_FINITE
    ),
    Mutation(
        "deadline of a write, unasked",
        SAVER,
        "        if self.writing and time.monotonic() > self._deadline:\n",
        "        if False:\n",
        BACKGROUND,
    ),
    Mutation("room before a run", SAVER, "        if free < missing:\n", "        if False:\n", BACKGROUND),
    Mutation(
        "only a full disk is forgiven",
        SAVER,
        "        if isinstance(self._failure, DiskFullError):\n            self._failure = None",
        "        if True:\n            self._failure = None",
        BACKGROUND,
    ),
    Mutation(
        "a full disk ends the run",
        "session.py",
        '            if self._config.checkpoint.on_disk_full == "stop":\n',
        "            if False:\n",
        FULL_RUN,
    ),
    Mutation(
        "SIGTERM before training",
        "run.py",
        "            with ended_by_sigterm():\n",
        "            if True:\n",
        STOP_RUN,
    ),
    Mutation(
        "the cause before the last write",
        "session.py",
        "            with self._checkpointer, self._cause_first():\n",
        "            with self._checkpointer:\n",
        RAISES,
    ),
    Mutation(
        "deadline of an evaluation",
        "decoding/evaluator.py",
        "        self._thread.join(seconds)\n        if self._thread.is_alive():\n",
        "        self._thread.join()\n        if self._thread.is_alive():\n",
        EVALUATOR,
    ),
    Mutation(
        "evaluation leaves a failed run",
        "decoding/evaluator.py",
        "        self._leave.set()\n",
        "",
        EVALUATOR,
    ),
    Mutation(
        "error of an evaluation",
        "decoding/evaluator.py",
        "            self._results.put(error)\n",
        "            pass\n",
        EVALUATOR,
    ),
    Mutation(
        "steps after the checkpoint are written anew",
        "metrics.py",
        ' and line["progress/step"] <= step]',
        "]",
        METRICS,
    ),
    Mutation(
        "a line that was cut off",
        "metrics.py",
        "    except json.JSONDecodeError:\n        return None\n",
        "    except json.JSONDecodeError:\n        raise\n",
        METRICS,
    ),
    Mutation(
        "train runs under a monitor",
        "cli.py",
        "    if not start_heartbeat(os.environ):\n",
        "    if False:\n",
        PROCESS,
    ),
]

MUTATIONS = [*SYNCS, *CHECKS, *ABORTS, *DEADLINES, *PIPELINE, *RUN]
