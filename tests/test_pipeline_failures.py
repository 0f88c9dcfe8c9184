"""Whatever fails, wherever: the run ends within seconds with that cause, and no thread stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import pytest
import torch

from draftline.config import DeadlineConfig, OptimConfig
from draftline.data.rows import Row, RowSource
from draftline.drafter.worker import StepRecord
from draftline.errors import Blame, ConfigError, NonFiniteError, StallError, blame_of
from draftline.pipeline.engine import Engine, Ready
from draftline.pipeline.job import Job
from draftline.pipeline.state import ShardState, join_shards
from draftline.resilience.faults import Fault, InjectedFaultError, armed
from tests.pipeline_fixtures import MemoryStore, colocated, make_job, run_job

WITHIN_S = 5.0


@dataclass(frozen=True)
class Ending:
    error: BaseException
    seconds: float
    """From the last sign of life to the error."""
    num_steps: int

    @property
    def notes(self) -> list[str]:
        return getattr(self.error, "__notes__", [])


class Reader:
    """Takes a run's events to their end."""

    last = 0.0
    num_steps = 0

    def follow(self, job: Job) -> None:
        self.last = time.monotonic()
        for event in Engine(job).events():
            self.last = time.monotonic()
            self.num_steps += isinstance(event, StepRecord)


def ending_of(job: Job) -> Ending:
    """Run a job that must fail, and check that it leaves nothing behind."""
    before, reader = set(threading.enumerate()), Reader()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each test looks at the error it expects
        reader.follow(job)
    seconds = time.monotonic() - reader.last
    assert set(threading.enumerate()) == before
    return Ending(caught.value, seconds, reader.num_steps)


STEPS, ROWS_PER_STEP = 4, 4
MOMENTS = {"first": 0, "middle": 2, "last": STEPS - 1}


@pytest.mark.parametrize("step", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("kind", ["target", "drafter", "loader"])
def test_a_worker_that_raises_ends_the_run_with_its_error_and_name(kind: str, step: int):
    row = ROWS_PER_STEP * step + 1  # rows 1, 3, .. go through target-1
    fault, named = {
        "target": (Fault(worker="target-1", where="row", at=row, kind="raise"), "target-1"),
        "drafter": (Fault(worker="drafter-1", where="step", at=step, kind="raise"), "drafter-1"),
        "loader": (Fault(worker="loader", where="row", at=row, kind="raise"), "loader-"),
    }[kind]
    with armed(fault) as plan:
        ending = ending_of(make_job(2, 2, steps=STEPS, rows_per_step=ROWS_PER_STEP))
    assert plan.fired == [fault]
    assert isinstance(ending.error, InjectedFaultError)
    assert ending.notes[0].startswith(f"worker: {named}")
    assert not any("did not stop" in note for note in ending.notes)
    assert ending.seconds < WITHIN_S


@pytest.mark.parametrize(("where", "at"), [("row", 2), ("step", 1)])
def test_a_colocated_worker_that_raises_ends_the_run_too(where: str, at: int):
    job = colocated(make_job(steps=2, rows_per_step=4), 2)
    worker = "drafter-0" if where == "row" else "drafter-1"
    with armed(Fault(worker=worker, where=where, at=at, kind="raise")):
        ending = ending_of(job)
    assert isinstance(ending.error, InjectedFaultError)
    assert len(ending.notes) == 1
    assert ending.notes[0].startswith(f"worker: {worker}, row ")
    assert ending.seconds < WITHIN_S


def test_a_target_that_cannot_be_built_ends_the_run_before_it_begins():
    ending = ending_of(replace(make_job(2, 2), max_documents=1))
    assert isinstance(ending.error, ConfigError)
    assert "more than the 1 that fit its tables" in str(ending.error)
    assert ending.notes[0].startswith("worker: target-")
    assert ending.num_steps == 0


def test_a_drafter_that_cannot_be_built_ends_the_run_before_it_begins():
    ending = ending_of(replace(make_job(2, 2), initial={"no.such.weight": torch.zeros(1)}))
    assert isinstance(ending.error, RuntimeError)
    assert "no.such.weight" in str(ending.error)
    assert ending.notes[0].startswith("worker: drafter-")
    assert ending.num_steps == 0


def test_a_target_that_hangs_is_a_stall_that_names_the_row_and_who_does_not_stop():
    deadlines = DeadlineConfig(stall_timeout_s=1, startup_timeout_s=60)
    job = make_job(2, 1, steps=4, rows_per_step=2, deadlines=deadlines)
    before = set(threading.enumerate())
    hang = Fault(worker="target-1", where="row", at=5, kind="sleep", seconds=8)
    with armed(hang), pytest.raises(StallError) as error:
        list(Engine(job).events())
    assert str(error.value).startswith("no progress for 1 s: target-1 in 'forward' of row 5 for 1.")
    assert blame_of(error.value) == Blame("target-1", 5)
    assert "over.wait(fault.seconds)" in (error.value.stacks or ""), "the stack of who hangs"
    assert "drafter-0: " in (error.value.stacks or ""), "the fill of the channel"
    assert error.value.__notes__[-1] == "did not stop within 5 s: target-1"
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # it wakes, sees that the run has ended, and leaves
    assert set(threading.enumerate()) == before


def test_a_worker_that_hangs_while_it_starts_is_named_and_not_those_who_wait_for_their_turn():
    deadlines = DeadlineConfig(stall_timeout_s=20, startup_timeout_s=1)
    hang = Fault(worker="target-1", where="start", at=0, kind="sleep", seconds=3)
    before = set(threading.enumerate())
    with armed(hang), pytest.raises(StallError) as error:
        list(Engine(make_job(2, 2, deadlines=deadlines)).events())
    assert "target-1 in 'starting'" in str(error.value).partition("Starving")[0]
    assert blame_of(error.value) == Blame("target-1", 0)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def read_slowly(job: Job, seconds: float) -> None:
    for event in Engine(job).events():
        if isinstance(event, StepRecord):
            time.sleep(seconds)


def test_workers_find_a_stall_themselves_when_nobody_reads_their_events():
    deadlines = DeadlineConfig(stall_timeout_s=0.5, startup_timeout_s=60)
    hang = Fault(worker="target-0", where="row", at=5, kind="sleep", seconds=4)
    job = make_job(1, 1, steps=4, rows_per_step=2, deadlines=deadlines)
    before = set(threading.enumerate())
    with armed(hang), pytest.raises(StallError, match="drafter-0 waited 1 s for row 5 from its target"):
        read_slowly(job, 3)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def test_a_failure_reaches_those_who_wait_for_the_disk():
    job = make_job(1, 2, steps=8, rows_per_step=2, boundaries=frozenset({1}))
    taken = list[ShardState]()

    def follow() -> None:
        for event in Engine(job, is_safe=lambda: len(taken) < 2).events():
            last[0] = time.monotonic()
            if isinstance(event, ShardState):
                taken.append(event)

    last = [
        time.monotonic()
    ]  # when the main thread last heard of anything; on a busy machine the fault may be first
    before = set(threading.enumerate())
    # by row 6 all drafters wait at the second boundary; the target still works ahead
    with armed(Fault(worker="target-0", where="row", at=6, kind="raise")), pytest.raises(InjectedFaultError):
        follow()
    assert time.monotonic() - last[0] < WITHIN_S
    assert set(threading.enumerate()) == before


def test_a_nan_in_the_taps_of_one_row_ends_the_run_with_its_step_and_rows():
    with armed(Fault(worker="target-1", where="row", at=5, kind="nan")):
        ending = ending_of(make_job(2, 2, steps=4, rows_per_step=4))
    assert isinstance(ending.error, NonFiniteError)
    assert "step 1: the loss of row 5 is not finite, gradient norm nan; the update was withheld" in str(
        ending.error
    )
    assert blame_of(ending.error) == Blame("drafter-1", 5)


def test_a_nan_leaves_the_weights_of_the_last_good_step():
    optim = OptimConfig(steps=3, lr=3e-3, warmup_ratio=0.0, min_lr_ratio=1.0)  # a rate that no length changes
    clean = run_job(make_job(1, 2, steps=1, rows_per_step=4, optim=optim)).states[0].weights()
    job = make_job(1, 2, steps=3, rows_per_step=4, optim=optim, boundaries=frozenset({1}))
    shards: list[ShardState] = []
    with armed(Fault(worker="target-0", where="row", at=5, kind="nan")), pytest.raises(NonFiniteError):
        shards.extend(event for event in Engine(job).events() if isinstance(event, ShardState))
    assert [shard.steps_done for shard in shards] == [1, 1]
    for name, weight in join_shards(shards).weights().items():
        assert torch.equal(weight, clean[name])


def test_a_reader_that_walks_away_leaves_no_thread():
    before = set(threading.enumerate())
    events = Engine(make_job(2, 2, steps=50)).events()
    assert isinstance(events, Generator)
    for event in events:
        if isinstance(event, StepRecord):
            break
    events.close()
    assert set(threading.enumerate()) == before


def test_a_reader_that_walks_away_while_workers_wait_for_each_other_to_start_leaves_no_thread():
    before = set(threading.enumerate())
    events = Engine(make_job(2, 2)).events()
    assert isinstance(events, Generator)
    while not isinstance(next(events), Ready):
        pass
    time.sleep(0.2)
    events.close()
    assert set(threading.enumerate()) == before


def test_a_reader_that_walks_away_while_drafters_wait_for_the_disk_leaves_no_thread():
    before, taken = set(threading.enumerate()), list[object]()
    job = make_job(1, 2, steps=8, rows_per_step=2, boundaries=frozenset({1}))
    events = Engine(job, is_safe=lambda: len(taken) < 2).events()
    assert isinstance(events, Generator)
    while len(taken) < 2:
        event = next(events)
        taken.extend([event] if isinstance(event, ShardState) else [])
    time.sleep(0.5)
    events.close()
    assert set(threading.enumerate()) == before


class SlowSource(RowSource):
    """Rows that come from slow storage."""

    def row(self, index: int) -> Row:
        time.sleep(0.05)
        return super().row(index)


def test_a_stop_that_is_asked_for_while_rows_are_on_their_way_is_no_failure():
    job = make_job(3, 1, steps=50, rows_per_step=1)
    job = replace(job, source=SlowSource(MemoryStore(), job.shape, 0))
    before = set(threading.enumerate())
    engine, steps, states = Engine(job), [], []
    for event in engine.events():
        if isinstance(event, StepRecord):
            steps.append(event.step)
            if event.step == 2:
                engine.stop_line.request()
        elif isinstance(event, ShardState):
            states.append(event)
    assert steps == list(range(len(steps)))
    assert len(steps) < 10
    assert [state.steps_done for state in states] == [len(steps)]
    assert set(threading.enumerate()) == before


class AnchorlessSource(RowSource):
    """A drafter's rows without any anchor: every second one, or all."""

    stride = 2

    def row(self, index: int) -> Row:
        row = super().row(index)
        if index % self.stride != self.stride - 1:
            return row
        return replace(
            row,
            anchors=torch.zeros_like(row.anchors),
            anchor_valid=torch.zeros_like(row.anchor_valid),
            labels=torch.zeros_like(row.labels),
            weights=torch.zeros_like(row.weights),
        )


def test_one_drafter_that_gets_no_anchor_at_all_holds_nobody_up():
    job = make_job(1, 2, steps=3, rows_per_step=4)
    job = replace(job, source=AnchorlessSource(MemoryStore(), job.shape, 0))
    alone = replace(job, plan=replace(job.plan, drafters=job.plan.drafters[:1]))
    alone = replace(alone, schedule=replace(job.schedule, num_drafters=1))
    split, together = run_job(job), run_job(alone)
    assert split.losses == pytest.approx(together.losses, rel=1e-5)
    assert all(loss > 1 for loss in split.losses)


def test_steps_without_any_anchor_are_steps_of_loss_zero_that_change_nothing():
    class Silent(AnchorlessSource):
        stride = 1

    job = make_job(1, 2, steps=2, rows_per_step=2, boundaries=frozenset({1}))
    job = replace(job, source=Silent(MemoryStore(), job.shape, 0))
    outcome = run_job(job)
    assert [float(record.stats.abs().sum()) for record in outcome.records] == [0.0, 0.0]
    first, last = (state.weights() for state in outcome.states)
    assert all(torch.equal(weight, first[name]) for name, weight in last.items())
    assert all(weight.isfinite().all() for weight in last.values())
