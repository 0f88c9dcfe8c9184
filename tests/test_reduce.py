"""Drafters of one process add their gradients in a fixed order and step as one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from draftline.compiling.graphs import LaunchedStep
from draftline.config import OptimConfig
from draftline.errors import StallError
from draftline.optim import FlatParameters, ShardedAdamW
from draftline.pipeline.devices import Place
from draftline.pipeline.reduce import Meeting, Member, Reducer, StepOutcome, sum_in_order
from draftline.pipeline.supervise import Abort, AbortedError, Supervisor

CPU = torch.device("cpu")
CONFIG = OptimConfig(steps=10, weight_decay=0.05)
NUM_STATS = 5


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 13, bias=False), nn.RMSNorm(13), nn.Linear(13, 7, bias=False))


@dataclass(frozen=True)
class Outcome:
    weights: list[Tensor]  # of each drafter
    outcomes: list[list[StepOutcome]]  # of each drafter, by step


def together(work: Callable[[int], None], size: int, abort: Abort | None = None) -> None:
    """Run `work(0) .. work(size - 1)` in threads of their own and raise the first failure."""
    supervisor = Supervisor(abort or Abort())
    for index in range(size):
        supervisor.start(f"drafter-{index}", lambda i=index: work(i))
    supervisor.join(5)


def train(size: int, steps: list[list[float]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Outcome:
    """`steps[s][r]`: scale of the gradient of row r of step s; row r goes to drafter r mod size."""
    abort, draw = Abort(), random.Random(seed)
    reducer = Reducer(size, abort, 20)
    parameters = [FlatParameters(module(), size, dtype) for _ in range(size)]
    optimizers = [ShardedAdamW(p, i, size, CONFIG) for i, p in enumerate(parameters)]
    stats = [torch.zeros(NUM_STATS) for _ in range(size)]
    for index in range(size):
        reducer.join(
            index,
            Member(
                parameters[index],
                optimizers[index],
                LaunchedStep(optimizers[index].update),
                stats[index],
                torch.zeros(()),
                torch.zeros(12),
                Place.on(CPU),
            ),
        )
    outcomes: list[list[StepOutcome]] = [[] for _ in range(size)]

    def work(index: int) -> None:
        for step, scales in enumerate(steps):
            optimizers[index].lr.fill_(1e-2)
            for row in range(index, len(scales), size):
                gradients = row_gradients(parameters[index], step, row, scales[row])
                (parameters[index].write if row == index else parameters[index].accumulate)(gradients)
                stats[index][:2] += torch.tensor([scales[row], 2.0])
            time.sleep(draw.random() * 2e-3)
            outcomes[index].append(reducer.reduce(index))

    together(work, size, abort)
    return Outcome([p.weights for p in parameters], outcomes)


def row_gradients(parameters: FlatParameters, step: int, row: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + row)
    return [scale * torch.randn(p.shape, generator=generator) for p in parameters.parameters]


class FakeStream:
    """A stream that says what it was told; on a CPU there is none."""

    def __init__(self, name: str, cuda_stream: int, said: list[str]) -> None:
        self.name, self.cuda_stream, self._said = name, cuda_stream, said

    def wait_stream(self, other: FakeStream) -> None:
        self._said.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        self._said.append(f"{self.name} records")
        return f"{self.name}'s event"

    def wait_event(self, event: str) -> None:
        self._said.append(f"{self.name} waits for {event}")


def test_an_update_follows_its_rows_and_the_next_row_follows_the_update(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    rows, updates = FakeStream("rows", 1, said), FakeStream("updates", 2, said)
    current = [rows]

    @contextmanager
    def entered() -> Iterator[None]:
        current.append(updates)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current[-1])
    parameters = FlatParameters(module(), 1, torch.float32)
    optimizer = ShardedAdamW(parameters, 0, 1, CONFIG)
    place = cast("Place", SimpleNamespace(stream=updates, entered=entered))
    stats, zero = torch.zeros(NUM_STATS), torch.zeros(())
    member = Member(parameters, optimizer, LaunchedStep(optimizer.update), stats, zero, torch.zeros(1), place)
    reducer = Reducer(1, Abort(), 20)
    reducer.join(0, member)
    member.await_update()  # nothing was updated yet
    with pytest.raises(RuntimeError, match="outside `Member"):
        reducer.reduce(0)
    with member.updating():
        said.append("reduce")
        reducer.reduce(0)
    member.await_update()
    assert said == [
        "updates waits for all of rows",
        "reduce",
        "updates records",
        "rows waits for updates's event",
    ]


STEPS = [[1.0] * 6, [3.0] * 6, [0.1] * 6]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_drafters_end_with_the_same_weights_and_figures(size: int):
    outcome = train(size, STEPS)
    for weights in outcome.weights[1:]:
        assert torch.equal(weights, outcome.weights[0])
    for others in outcome.outcomes[1:]:
        for mine, first in zip(others, outcome.outcomes[0], strict=True):
            assert torch.equal(mine.stats, first.stats)
            assert torch.equal(mine.norm, first.norm)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_any_number_of_drafters_steps_as_one_does(size: int):
    one, many = train(1, STEPS), train(size, STEPS)
    used = sum(p.numel() for p in module().parameters())  # padding differs with the number of shards
    torch.testing.assert_close(many.weights[0][:used], one.weights[0][:used])
    for ours, theirs in zip(many.outcomes[0], one.outcomes[0], strict=True):
        torch.testing.assert_close(ours.stats, theirs.stats)
        torch.testing.assert_close(ours.norm, theirs.norm)


def test_which_thread_is_early_does_not_change_one_bit():
    runs = [train(3, STEPS, seed=seed).weights[0] for seed in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_sums_of_a_step_do_not_leak_into_the_next():
    outcome = train(2, [[1.0] * 4, [5.0] * 4])
    first, second = (step.stats for step in outcome.outcomes[0])
    assert first[:2].tolist() == [4.0, 8.0]
    assert second[:2].tolist() == [20.0, 8.0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_at_one_drafter_withholds_the_update_of_all(size: int, dtype: torch.dtype):
    sound = [[1.0] * 6, [1.0] * 6]
    poisoned = [*sound, [1.0] * 5 + [float("nan")]]
    before, after = train(size, sound, dtype), train(size, poisoned, dtype)
    for weights in after.weights:
        assert torch.equal(weights, before.weights[0])
    assert all(not steps[-1].norm.isfinite() for steps in after.outcomes)


def test_rows_without_any_anchor_at_one_drafter_leave_the_step_to_the_others():
    one = train(1, [[1.0, 0.0, 1.0, 0.0]])
    spread = train(2, [[1.0, 0.0, 1.0, 0.0]])  # all of drafter 1's gradients are zero
    used = sum(p.numel() for p in module().parameters())
    torch.testing.assert_close(spread.weights[0][:used], one.weights[0][:used])
    assert torch.equal(spread.weights[1], spread.weights[0])


def test_nobody_leaves_a_meeting_before_all_have_come():
    size, rounds = 4, 30
    meeting, arrived, draw = Meeting(size, Abort(), 20), [0] * 4, random.Random(0)

    def work(index: int) -> None:
        for count in range(1, rounds + 1):
            time.sleep(draw.random() * 1e-3)
            arrived[index] = count
            meeting.meet(CPU, "here")
            assert min(arrived) >= count

    together(work, size)
    assert arrived == [rounds] * size


def test_a_drafter_that_does_not_come_is_a_stall_that_says_where():
    with pytest.raises(StallError, match="the other drafters at the update"):
        Meeting(2, Abort(), 0.05).meet(CPU, "the update")


def test_an_abort_ends_a_meeting_within_a_second():
    abort = Abort()
    meeting = Meeting(2, abort, 20)
    threading.Timer(0.05, abort.raise_now).start()
    begin = time.monotonic()
    with pytest.raises(AbortedError):
        meeting.meet(CPU, "the update")
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("shape", [(), (7,), (20,)])
def test_gradients_of_other_devices_are_added_in_pieces(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("draftline.optim.PIECE", 8)
    carried: list[int] = []
    to = torch.Tensor.to

    def spy(tensor: torch.Tensor, *given: Any, **rest: Any) -> torch.Tensor:
        carried.append(tensor.numel())
        return to(tensor, *given, **rest)

    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    out = torch.empty(shape)
    monkeypatch.setattr(torch.Tensor, "to", spy)
    sum_in_order(out, parts)
    assert torch.equal(out, parts[0] + parts[1] + parts[2])
    assert max(carried) <= 8
    assert sum(carried) == 2 * out.numel()
