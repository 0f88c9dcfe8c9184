"""The threaded pipeline as a whole: any number of workers computes the same training."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from draftline.config import DeadlineConfig, OptimConfig
from draftline.drafter.model import new_weights
from draftline.drafter.step import AccumulatingStep
from draftline.drafter.supply import ChannelSupply, LocalSupply
from draftline.drafter.worker import StepRecord, _Reading
from draftline.pipeline import devices
from draftline.pipeline.engine import Engine
from draftline.pipeline.reduce import Member, Reducer
from draftline.pipeline.state import ShardState
from draftline.resilience.faults import Fault, armed
from tests.pipeline_fixtures import SPEC, colocated, make_job, run_job


def test_loss_falls_on_a_learnable_pattern():
    losses = run_job(make_job(steps=30, rows_per_step=2, optim=OptimConfig(steps=30, lr=1e-2))).losses
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 2), (2, 1), (2, 3), (5, 3)])
def test_losses_do_not_depend_on_the_number_of_workers(targets: int, drafters: int):
    alone = run_job(make_job())
    split = run_job(make_job(targets, drafters))
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, weight in split.states[-1].weights().items():
        torch.testing.assert_close(weight, alone.states[-1].weights()[name], rtol=1e-3, atol=1e-5)


def test_colocated_workers_train_exactly_like_split_ones():
    assert run_job(colocated(make_job(), 2)).losses == run_job(make_job(2, 2)).losses


def test_the_same_run_twice_is_the_same_run_to_the_last_bit():
    first, second = run_job(make_job(2, 2)), run_job(make_job(2, 2))
    assert first.losses == second.losses
    for name, weight in first.states[-1].weights().items():
        assert torch.equal(weight, second.states[-1].weights()[name])


def test_the_split_into_rows_per_drafter_does_not_change_the_loss():
    together = run_job(make_job(1, 1, steps=2, rows_per_step=6))
    spread = run_job(make_job(1, 6, steps=2, rows_per_step=6))
    assert spread.losses == pytest.approx(together.losses, rel=1e-5)


@pytest.mark.parametrize("in_one", [False, True], ids=["split", "colocated"])
def test_a_step_is_updated_beside_the_next_row_which_waits_before_it_reads_a_weight(
    in_one: bool, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU the update has a stream of its own; here the order of calls that makes that right is watched."""
    done: list[str] = []

    def watch(owner: type, name: str, said: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (done.append(said), original(*a, **k))[1])

    @contextmanager
    def updating(member: Member) -> Iterator[None]:
        done.append("updating")
        yield
        done.append("updated")

    monkeypatch.setattr(Member, "updating", updating)
    watch(Member, "await_update", "await")
    watch(LocalSupply if in_one else ChannelSupply, "load", "load")
    watch(AccumulatingStep, "replay", "row")
    watch(Member, "mark", "mark")
    watch(Reducer, "reduce", "reduce")
    watch(_Reading, "__init__", "read")
    job = make_job(steps=3, rows_per_step=2)
    run_job(colocated(job, 1) if in_one else job)
    step = ["load", "await", "row", "mark", "load", "row", "mark", "updating", "reduce", "read", "updated"]
    assert done == [*step, *step, *step, "await"], "the last state is read after its update too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_run_begins_with_are_let_go_once_its_workers_have_theirs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """They lie on the host in float32, gigabytes for a large drafter."""
    drawn: list[StorageWeakRef] = []

    def watched(*given: Any) -> dict[str, Tensor]:
        weights = new_weights(*given)
        drawn.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in weights.values())
        return weights

    monkeypatch.setattr(devices, "new_weights", watched)
    job = make_job(1, 2, rows_per_step=2)
    for event in Engine(replace(job, plan=replace(job.plan, drafter_dtype=dtype))).events():
        if isinstance(event, StepRecord):
            gc.collect()
            assert [ref.expired() for ref in drawn] == [True] * len(new_weights(SPEC, 0))


@pytest.mark.parametrize("drafters", [1, 2])
def test_a_resumed_run_ends_in_the_same_state_and_draws_no_weights(
    drafters: int, monkeypatch: pytest.MonkeyPatch
):
    whole = run_job(make_job(1, drafters, steps=4, boundaries=frozenset({2})))
    monkeypatch.setattr(devices, "new_weights", lambda *_: pytest.fail("weights were drawn"))
    job, middle = make_job(1, drafters, steps=4), whole.states[0]
    schedule = replace(job.schedule, first_step=middle.steps_done)
    resumed = run_job(replace(job, schedule=schedule, resumed=middle.tensors))
    assert middle.steps_done == 2
    for name, tensor in resumed.states[-1].tensors.items():
        assert torch.equal(tensor, whole.states[-1].tensors[name]), name


def test_drafters_wait_at_a_boundary_until_the_state_before_it_is_safe():
    safe, num_shards, newest = threading.Event(), 0, 0
    job = make_job(1, 2, steps=8, rows_per_step=2, boundaries=frozenset({2}))
    engine = Engine(job, is_safe=lambda: num_shards < 2 or safe.is_set())
    for event in engine.events():
        if isinstance(event, ShardState):
            num_shards += 1
            if num_shards == 2:  # the state of step 2 is on its way to a slow disk
                until = time.monotonic() + 1
        if isinstance(event, StepRecord):
            newest = event.step + 1
        if num_shards >= 2 and not safe.is_set():
            assert newest <= 4, "a kill would cost more than two boundaries"
            if time.monotonic() > until:
                assert newest == 4
                safe.set()
    assert (newest, num_shards) == (8, 8)


class SlowDisk:
    """Takes a while for the first state, and little for the others."""

    def __init__(self) -> None:
        self.num_states, self.busy_until = 0, 0.0

    def take(self) -> None:
        self.num_states += 1
        self.busy_until = time.monotonic() + (1.5 if self.num_states == 1 else 0)

    def is_idle(self) -> bool:
        return time.monotonic() > self.busy_until


def test_a_slow_disk_is_no_stall_of_the_workers_that_wait_for_it():
    deadlines = DeadlineConfig(stall_timeout_s=0.5, startup_timeout_s=60, write_timeout_s=20)
    job = make_job(1, 1, steps=4, rows_per_step=1, boundaries=frozenset({1}), deadlines=deadlines)
    disk = SlowDisk()
    for event in Engine(job, disk.is_idle).events():
        if isinstance(event, ShardState):
            disk.take()
    assert disk.num_states == 4


def test_drafters_wait_until_the_reader_has_taken_the_state_before():
    job = make_job(1, 2, steps=8, rows_per_step=2, boundaries=frozenset({2}))
    marker = Fault(worker="drafter-0", where="step", at=4, kind="sleep", seconds=1)
    num_shards = 0
    with armed(marker) as plan:
        for event in Engine(job).events():
            if isinstance(event, ShardState):
                num_shards += 1
                if num_shards == 2:
                    time.sleep(1)  # the reader is busy with the state of step 2
                    assert plan.fired == [], "step 4 has begun before the state of step 2 was dealt with"
    assert num_shards == 8
    assert plan.fired == [marker]
