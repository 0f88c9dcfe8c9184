"""A training run from a configuration to a measured, exported drafter. Read this first.

prepare_job    refuse what cannot work, load the target, test it on itself
Engine         threads: target workers -> channels -> drafter workers
Session        what the main thread does with their reports: metrics, checkpoints, evaluation
finish         measure on unseen prompts, export, reload
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from draftline.checkpoint import Checkpointer, Loaded, Snapshot
from draftline.config import RunConfig
from draftline.console import Bar, Screen
from draftline.drafter.model import Drafter
from draftline.drafter.stats import read_stats
from draftline.drafter.worker import StepRecord
from draftline.errors import DraftlineError
from draftline.evaluate import Evaluation
from draftline.evaluator import Evaluator
from draftline.export import config_json, export_drafter, serving_tensors
from draftline.folder import RunFolder
from draftline.greedy import Limit
from draftline.metrics import MetricsLog, Progress, eval_metrics, train_metrics
from draftline.paths import CHECKPOINTS, EXPORT, builtin_prompts
from draftline.pipeline.engine import Engine, Ready
from draftline.pipeline.job import Job
from draftline.pipeline.state import ShardState, TrainingState, join_shards
from draftline.prompts import load_prompts
from draftline.result import RESULT, RunResult, write_result
from draftline.setup import Prepared, prepare_job
from draftline.signals import StopOnSignal

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
WRITE_TIMEOUT_S = 600.0
"""Seconds that one checkpoint may take to reach the disk."""


@dataclass(frozen=True)
class Trained:
    """What a finished run leaves."""

    folder: Path
    drafter: Path
    """The exported drafter, in serving layout."""
    steps: int
    loss: float | None
    """Of the last step, nats."""
    seconds: float
    """Of the training loop in this process."""
    tokens_per_s: float
    """Target tokens, padding excluded."""
    before: Evaluation | None
    after: Evaluation | None


def train(config: RunConfig, screen: Screen, command: Sequence[str] = ()) -> Trained:
    """Train, measure and export; resumes when `config.output` holds a checkpoint of the same run.

    Raises:
        DraftlineError: see errors.py; `result.json` in the output folder names the cause.
    """
    run_id = uuid.uuid4().hex[:8]
    with RunFolder(config.output, run_id):
        (config.output / RESULT).unlink(missing_ok=True)  # of the run before
        try:
            prepared = prepare_job(config, screen)
            with StopOnSignal() as stop:
                trained = _Session(config, prepared, screen, stop).run()
        except BaseException as error:
            write_result(config.output, _failed(error, command))
            raise
        write_result(
            config.output,
            RunResult(
                exit_code=0,
                cause=f"finished {trained.steps} steps",
                step=trained.steps,
                command=tuple(command),
            ),
        )
        return trained


def _failed(error: BaseException, command: Sequence[str]) -> RunResult:
    notes = getattr(error, "__notes__", [])
    worker = next((n.removeprefix("worker: ") for n in notes if n.startswith("worker: ")), None)
    return RunResult(
        exit_code=error.exit_code if isinstance(error, DraftlineError) else 1,
        cause=str(error) or type(error).__name__,
        error=type(error).__name__,
        worker=worker,
        consequences=tuple(n for n in notes if not n.startswith("worker: ")),
        command=tuple(command),
    )


class _Session:
    """The main thread's part: takes the workers' reports and keeps what must outlive them."""

    def __init__(self, config: RunConfig, prepared: Prepared, screen: Screen, stop: StopOnSignal) -> None:
        self._config, self._screen, self._stop = config, screen, stop
        self._prepared, self._job = prepared, prepared.job
        self._checkpointer = Checkpointer(
            config.output / CHECKPOINTS,
            prepared.identity,
            keep=config.checkpoint.keep,
            write_timeout_s=WRITE_TIMEOUT_S,
        )
        self._progress = Progress(started=time.monotonic())
        self._shards: dict[int, list[ShardState]] = {}
        self._state: TrainingState | None = None
        self._loss: float | None = None
        self._evaluator = self._build_evaluator()

    def run(self) -> Trained:
        """Resume or start, train to the end, measure, export."""
        job = self._resume(self._checkpointer.load_latest())
        before = self._measure_start(job)
        begin = time.monotonic()
        log = MetricsLog(self._config.output)
        try:
            with self._checkpointer:
                self._train(job, log)
                if self._evaluator is not None:
                    self._evaluator.wait(WRITE_TIMEOUT_S)
                    self._report_evaluations(log)
            seconds = time.monotonic() - begin
            if self._stop.requested:
                raise self._stop.error(self._progress.step)
            return self._finish(before, seconds, log)
        finally:
            log.close()

    def _build_evaluator(self) -> Evaluator | None:
        data, settings, target = self._config.data, self._config.evaluation, self._job.target
        if data.eval_path is None:
            return None
        prompts = load_prompts(builtin_prompts(data.eval_path), target.tokenizer, settings.num_prompts)
        limit = Limit(settings.max_new_tokens, self._prepared.stop_token_ids)
        return Evaluator(target, self._job.spec, prompts, limit)

    def _measure_start(self, job: Job) -> Evaluation | None:
        if self._evaluator is None or job.resumed is not None:
            return None
        before = self._evaluator.measure(_initial_weights(job))
        self._screen.say(f"before training: tau {_tau(before)}")
        return before

    def _resume(self, loaded: Loaded | None) -> Job:
        if loaded is None:
            return self._job
        for note in loaded.notes:
            self._screen.say(note)
        self._screen.say(f"resuming after step {loaded.step} from {loaded.path}")
        self._progress.step = loaded.step
        self._progress.tokens_target = int(loaded.meta["tokens_target"])
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
        engine = Engine(job)
        with self._screen.progress("step", schedule.num_steps, schedule.first_step) as bar:
            for event in engine.events():
                self._checkpointer.check()
                if self._stop.requested:
                    engine.stop_line.request()
                if isinstance(event, Ready):
                    for note in event.notes:
                        self._screen.say(note)
                elif isinstance(event, StepRecord):
                    self._note_step(event, log, bar)
                elif isinstance(event, ShardState):
                    self._collect(event)
                self._report_evaluations(log)

    def _note_step(self, record: StepRecord, log: MetricsLog, bar: Bar) -> None:
        self._progress.tokens_target += record.num_tokens
        if record.rows.start % len(self._job.plan.drafters):
            return  # every drafter reports its tokens; the sums are the same, one of them is enough
        stats = read_stats(record.stats, self._job.spec.block_size)
        self._loss = stats.loss
        self._progress.step = record.step + 1
        self._progress.blocks += stats.num_blocks
        log.write(self._progress, train_metrics(record, stats))
        rate = self._progress.tokens_target / max(1e-9, time.monotonic() - self._progress.started)
        bar.update(record.step + 1, f"loss {stats.loss:.3f}  {rate / 1000:.1f} k tokens/s")

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
            self._checkpointer.mark_best(measured.step, measured.evaluation.overall.tau)
            log.write(self._progress, {"eval/step": measured.step, **eval_metrics(measured.evaluation)})
            self._screen.say(f"step {measured.step}: tau {_tau(measured.evaluation)}")

    def _save(self, state: TrainingState) -> None:
        job = self._job
        self._checkpointer.save(
            Snapshot(
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
        )

    def _finish(self, before: Evaluation | None, seconds: float, log: MetricsLog) -> Trained:
        assert self._state is not None
        weights = self._state.weights()
        after = self._evaluator.measure(weights) if self._evaluator else None
        if after is not None:
            log.write(self._progress, eval_metrics(after))
            self._screen.say(f"after {self._state.steps_done} steps: tau {_tau(after)}")
        out = export_drafter(self._job.spec, weights, self._config.output / EXPORT)
        return Trained(
            folder=self._config.output,
            drafter=out,
            steps=self._state.steps_done,
            loss=self._loss,
            seconds=seconds,
            tokens_per_s=self._progress.tokens_target / max(seconds, 1e-9),
            before=before,
            after=after,
        )


def _initial_weights(job: Job) -> dict[str, Tensor]:
    drafter = Drafter(job.spec)
    drafter.init_weights(job.seed)
    if job.initial is not None:
        drafter.load_state_dict(dict(job.initial), strict=True)
    return drafter.state_dict()


def _tau(evaluation: Evaluation) -> str:
    overall = evaluation.overall
    return f"{overall.tau:.2f} (95 % {overall.tau_low:.2f} to {overall.tau_high:.2f})"
