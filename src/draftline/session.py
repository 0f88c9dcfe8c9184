"""What the main thread of a run does: it takes the workers' reports and keeps what must outlive them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from draftline.checkpoint import Loaded, Snapshot, read_checkpoint
from draftline.checkpoint.layout import checkpoint_name
from draftline.config import RunConfig
from draftline.console import Bar, Screen
from draftline.decoding.evaluate import Evaluation
from draftline.decoding.evaluator import Evaluator
from draftline.decoding.greedy import Limit
from draftline.drafter.model import new_weights
from draftline.drafter.stats import read_stats
from draftline.drafter.worker import StepRecord
from draftline.errors import DiskFullError, blame_of
from draftline.metrics import MetricsLog, Progress, Rate, eval_metrics, train_metrics
from draftline.paths import EXPORT
from draftline.pipeline.engine import BadStep, Engine, Ready
from draftline.pipeline.job import Job
from draftline.pipeline.state import ShardState, TrainingState, join_shards
from draftline.resilience.badstep import saved_for_replay
from draftline.resilience.ending import explained
from draftline.resilience.folder import CHECKPOINTS
from draftline.resilience.signals import StopOnSignal
from draftline.resilience.watchdog import Starvation
from draftline.serving.base_model import find_base_model
from draftline.serving.card import measured_in, measured_section, model_card
from draftline.serving.export import config_json, export_drafter, serving_tensors
from draftline.serving.measured import account, drafter_hash, earlier_figures, figures_to_show
from draftline.setup import Prepared, checkpoint_bytes
from draftline.trained import Trained

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
EVALUATION_TIMEOUT_S = 600.0
"""Seconds that a background evaluation may still take when training is done."""
LEAVE_S = 5.0
"""Seconds for a background evaluation to leave a run that has failed or was stopped."""


class Session:
    """The main thread's part: takes the workers' reports and keeps what must outlive them."""

    def __init__(self, config: RunConfig, prepared: Prepared, screen: Screen, stop: StopOnSignal) -> None:
        self._config, self._screen, self._stop = config, screen, stop
        self._prepared, self._job = prepared, prepared.job
        self._checkpointer = prepared.accepted.checkpointer
        self._progress = Progress(started=time.monotonic())
        self._rate = Rate()
        self._resumed_tokens = 0
        """Of `tokens_target`, what earlier processes read."""
        self._records: dict[int, list[StepRecord]] = {}
        self._shards: dict[int, list[ShardState]] = {}
        self._state: TrainingState | None = None
        self._loss: float | None = None
        self._accept_anchor_mean: float | None = None
        self._evaluator = self._build_evaluator()
        self.num_skipped_checkpoints = 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps whose outcome is known."""
        return self._progress.step

    @property
    def num_skipped_documents(self) -> int:
        """Documents of corrupt shards that the run does without."""
        return sum(damage.documents for damage in self._prepared.accepted.store.damages)

    @property
    def newest_checkpoint(self) -> Path | None:
        """What the same command would resume from."""
        return self._checkpointer.newest

    def run(self) -> Trained:
        """Resume or start, train to the end, measure, export."""
        job = self._resume(self._prepared.accepted.loaded)
        self._require_room(job)
        log = MetricsLog(self._config.output, job.schedule.first_step, say=self._screen.say)
        try:
            before = self._measure_start(job, log)
            begin = time.monotonic()
            with self._checkpointer, self._cause_first():
                self._evaluate_again(job, log)
                self._train(job, log)
                self._end_evaluation(log)
                with self._full_disk_may_pass():
                    self._checkpointer.wait()
            seconds = time.monotonic() - begin
            if self._stop.requested:
                raise self._stop.error(self._progress.step)
            return self._finish(before, seconds, log)
        finally:
            log.close()
            if self._evaluator is not None:
                self._evaluator.leave(LEAVE_S)

    @contextmanager
    def _cause_first(self) -> Iterator[None]:
        """Say what ends the run before it waits for the checkpoint in flight, which may take minutes."""
        try:
            yield
        except BaseException as error:
            if (in_flight := self._checkpointer.in_flight()) is not None:
                blamed, (step, seconds) = blame_of(error), in_flight
                who = blamed.worker if blamed else "the main thread"
                self._screen.say(
                    f"{who} failed: {explained(error)}. The run ends when the checkpoint of step {step} is on the "
                    f"disk, in {seconds:.0f} s at the latest (deadlines.write_timeout_s)"
                )
            raise

    def _require_room(self, job: Job) -> None:
        if job.schedule.first_step >= job.schedule.num_steps:
            return
        with self._full_disk_may_pass():  # again: loading the target took its time, and others use the disk
            self._checkpointer.require_room(checkpoint_bytes(job.spec))

    @contextmanager
    def _full_disk_may_pass(self) -> Iterator[None]:
        """Let a checkpoint without room on the disk pass, loudly, if the user asked for that."""
        try:
            yield
        except DiskFullError as error:
            if self._config.checkpoint.on_disk_full == "stop":
                raise
            self._checkpointer.forgive()
            self.num_skipped_checkpoints += 1
            self._screen.say(f"CHECKPOINT SKIPPED, {self.num_skipped_checkpoints} so far: {error}")

    def _evaluate_again(self, job: Job, log: MetricsLog) -> None:
        """An evaluation that the last process owed and did not finish."""
        if self._state is not None and job.schedule.first_step not in log.evaluated:
            self._start_evaluation(self._state)

    def _end_evaluation(self, log: MetricsLog) -> None:
        if self._evaluator is None:
            return
        if (
            not self._stop.requested
        ):  # who sends a signal does not wait for it; it is made when the run goes on
            self._evaluator.wait(EVALUATION_TIMEOUT_S)
        self._report_evaluations(log)

    def _build_evaluator(self) -> Evaluator | None:
        accepted = self._prepared.accepted
        if not accepted.prompts:
            return None
        limit = Limit(self._config.evaluation.max_new_tokens, accepted.stop_token_ids)
        return Evaluator(self._job.target, self._job.spec, accepted.prompts, limit)

    def _measure_start(self, job: Job, log: MetricsLog) -> Evaluation | None:
        if self._evaluator is None or job.resumed is not None:
            return None
        before = self._evaluator.measure(job.initial or new_weights(job.spec, job.seed))
        self._log_evaluation(log, before, step=0)
        self._screen.say(f"before training: tau {_tau(before)}")
        return before

    def _log_evaluation(self, log: MetricsLog, measured: Evaluation, step: int) -> None:
        """Once for each step: a command that is given again measures again, and finds the same."""
        if step not in log.evaluated:
            metrics = eval_metrics(measured, self._accept_anchor_mean)
            log.write(self._progress, {"eval/step": step, **metrics})

    def _resume(self, loaded: Loaded | None) -> Job:
        if loaded is None:
            return self._job
        for note in loaded.notes:
            self._screen.say(note)
        self._screen.say(f"resuming after step {loaded.step} from {loaded.path}")
        self._progress.step = loaded.step
        self._progress.tokens_target = self._resumed_tokens = int(loaded.meta["tokens_target"])
        self._progress.blocks = int(loaded.meta["blocks"])
        state = dict(loaded.tensors[STATE_FILE])
        self._state = TrainingState(loaded.step, state)
        self._loss = loaded.meta["loss"]
        schedule = replace(self._job.schedule, first_step=loaded.step)
        return replace(self._job, schedule=schedule, resumed=state)

    def _train(self, job: Job, log: MetricsLog) -> None:
        schedule = job.schedule
        if schedule.first_step >= schedule.num_steps:
            return
        engine = Engine(job, is_safe=lambda: not self._checkpointer.writing)
        starvation = Starvation(engine.watchdog)
        with (
            saved_for_replay(self._prepared, self._config) as keep_bad_step,
            self._screen.progress("step", schedule.num_steps, schedule.first_step) as bar,
        ):
            for event in engine.events():
                with self._full_disk_may_pass():
                    self._checkpointer.check()
                if self._stop.requested:
                    engine.stop_line.request()
                if isinstance(event, Ready):
                    for note in event.notes:
                        self._screen.say(note)
                elif isinstance(event, StepRecord):
                    self._note_step(event, log, bar, starvation)
                elif isinstance(event, ShardState):
                    self._collect(event)
                elif isinstance(event, BadStep):
                    keep_bad_step(event)
                self._report_evaluations(log)

    def _note_step(self, record: StepRecord, log: MetricsLog, bar: Bar, starvation: Starvation) -> None:
        records = self._records.setdefault(record.step, [])
        records.append(record)
        if len(records) < len(self._job.plan.drafters):
            return  # each drafter counts its own tokens; all else is the same in every report
        del self._records[record.step]
        self._progress.tokens_target += sum(one.num_tokens for one in records)
        stats = read_stats(record.stats, self._job.spec.block_size)
        self._loss, self._accept_anchor_mean = stats.loss, stats.accept_anchor_mean
        self._progress.step = record.step + 1
        self._progress.blocks += stats.num_blocks
        log.write(self._progress, train_metrics(record, stats))
        rate = self._rate.after_step(self._progress.tokens_target, time.monotonic())
        speed = "" if rate is None else f"{rate / 1000:.1f} k tokens/s"
        detail = "  ".join(part for part in (f"loss {stats.loss:.3f}", speed, starvation.words()) if part)
        bar.update(record.step + 1, detail)

    def _collect(self, shard: ShardState) -> None:
        shards = self._shards.setdefault(shard.steps_done, [])
        shards.append(shard)
        if len(shards) < len(self._job.plan.drafters):
            return
        self._state = join_shards(self._shards.pop(shard.steps_done))
        self._save(self._state)
        self._start_evaluation(self._state)

    def _start_evaluation(self, state: TrainingState) -> None:
        every, done = self._config.evaluation.every, state.steps_done
        if self._evaluator is None or every is None or done % every or done == self._job.schedule.num_steps:
            return
        if not self._evaluator.start(state.weights(), done):
            self._screen.say(f"step {done}: the last evaluation still runs; this one is left out")

    def _report_evaluations(self, log: MetricsLog) -> None:
        for measured in self._evaluator.finished() if self._evaluator else ():
            with self._full_disk_may_pass():
                self._checkpointer.mark_best(measured.step, measured.evaluation.overall.tau)
            self._log_evaluation(log, measured.evaluation, measured.step)
            self._screen.say(f"step {measured.step}: tau {_tau(measured.evaluation)}")

    def _save(self, state: TrainingState) -> None:
        with self._full_disk_may_pass():
            self._checkpointer.wait()
        with self._full_disk_may_pass():
            self._checkpointer.save(self._snapshot(state))

    def _snapshot(self, state: TrainingState) -> Snapshot:
        job = self._job
        return Snapshot(
            step=state.steps_done,
            row=state.steps_done * job.schedule.rows_per_step,
            tensors={MODEL_FILE: serving_tensors(job.spec, state.weights()), STATE_FILE: state.tensors},
            texts={"config.json": config_json(job.spec)},
            meta={
                "tokens_target": self._progress.tokens_target,
                "blocks": self._progress.blocks,
                "loss": self._loss,
            },
            world={"targets": len(job.plan.targets), "drafters": len(job.plan.drafters)},
        )

    def _finish(self, before: Evaluation | None, seconds: float, log: MetricsLog) -> Trained:
        assert self._state is not None
        step, weights = self._state.steps_done, self._state.weights()
        after = self._evaluator.measure(weights) if self._evaluator else None
        if after is not None and self._evaluator is not None:
            self._log_evaluation(log, after, step)
            self._screen.say(f"after {step} steps: tau {_tau(after)}")
            best = self._better_checkpoint(after)
            if best is not None:
                step, weights = best.step, best.tensors[MODEL_FILE]
                after = self._evaluator.measure(weights)
                self._screen.say(f"step {step} was the best, with tau {_tau(after)}: that one is exported")
        return Trained(
            folder=self._config.output,
            drafter=self._export(weights, after),
            steps=self._state.steps_done,
            exported_step=step,
            loss=self._loss,
            seconds=seconds,
            tokens_per_s=(self._progress.tokens_target - self._resumed_tokens) / max(seconds, 1e-9),
            before=before,
            after=after,
            skipped_checkpoints=self.num_skipped_checkpoints,
            skipped_documents=self.num_skipped_documents,
        )

    def _better_checkpoint(self, after: Evaluation) -> Loaded | None:
        """The checkpoint that evaluations chose, unless the last step is at least as good."""
        assert self._state is not None
        with self._full_disk_may_pass():
            self._checkpointer.mark_best(self._state.steps_done, after.overall.tau)
        best = self._checkpointer.best
        if best is None or best.figure <= after.overall.tau:
            return None
        return read_checkpoint(self._config.output / CHECKPOINTS / checkpoint_name(best.step))

    def _export(self, weights: Mapping[str, Tensor], after: Evaluation | None) -> Path:
        spec, out = self._job.spec, self._config.output / EXPORT
        fresh, earlier = self._card_section(after), earlier_figures([out])

        def card(sha256: str) -> str:
            drafter = drafter_hash(sha256, spec)
            if fresh is None and earlier:
                self._screen.say(account(earlier, drafter, out))
            figures = figures_to_show(fresh, earlier, drafter)
            base_model = find_base_model(self._job.target.name, [out])
            return model_card(spec, base_model, str(out), figures=figures)

        return export_drafter(spec, weights, out, card, overwrite=True)  # of this very run, before it went on

    def _card_section(self, after: Evaluation | None) -> str | None:
        if after is None:
            return None
        target = self._job.target
        dtype = str(target.embedding.dtype).removeprefix("torch.")
        limit = self._config.evaluation.max_new_tokens
        return measured_section(after, measured_in(target.name, dtype, target.device.type, limit))


def _tau(evaluation: Evaluation) -> str:
    overall = evaluation.overall
    return f"{overall.tau:.2f} (95 % {overall.tau_low:.2f} to {overall.tau_high:.2f})"
