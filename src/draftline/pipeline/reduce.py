"""Gradient reduction between the drafters of one process: fixed order, sharded, no NCCL.

Drafter m owns the m-th shard: it reads that shard's gradients from all drafters, adds them in drafter order,
steps, and everyone copies the new shard back. A fixed order makes a run repeatable; device-to-device copies
and events replace messages. Between the phases the threads meet, with a deadline. All of it runs on a stream of its
own, beside the target's forward of the next row: see `Member.updating`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftline.compiling.graphs import Step
from draftline.events import DeviceEvent
from draftline.optim import FlatParameters, ShardedAdamW, pieces
from draftline.pipeline.devices import Place
from draftline.pipeline.supervise import Abort


class Meeting:
    """A barrier that can be aborted, at which streams hand each other events."""

    def __init__(self, size: int, abort: Abort, seconds: float) -> None:
        self._size, self._abort, self._seconds = size, abort, seconds
        self._condition = abort.condition()
        self._round = 0
        self._events: list[DeviceEvent | None] = []
        self._handed: list[DeviceEvent | None] = []

    def meet(self, device: torch.device, what: str) -> None:
        """Return when everyone is here; this thread's stream then waits for all work queued before.

        Raises:
            StallError, AbortedError: see `Abort.wait`.
        """
        if self._size == 1:
            return
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._condition:
            here = self._round
            self._events.append(event)
            if len(self._events) == self._size:
                self._handed, self._events = self._events, []
                self._round += 1
                self._condition.notify_all()
            self._abort.wait(
                self._condition, lambda: self._round > here, self._seconds, f"the other drafters at {what}"
            )
            events = self._handed
        for other in events:
            if other is not None:
                torch.cuda.current_stream(device).wait_event(other)


@dataclass
class Member:
    """One drafter's part in the reduction."""

    parameters: FlatParameters
    optimizer: ShardedAdamW
    update: Step[Tensor]  # the optimizer's, which returns the gradient norm []
    stats: Tensor  # float32 [stats]; summed over the rows of the step
    square_sum: Tensor  # float32 []
    marks: Tensor  # float32 [rows of a step]; see `mark`
    update_place: Place
    """Where `update` and all that leads to it run."""
    _updated: DeviceEvent | None = field(default=None, init=False)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """On the stream of updates, after everything that this thread's stream has been given so far.

        Nothing that a later row reads or writes may be touched on this thread's stream until `await_update`:
        weights, gradients, `stats` and `marks`.
        """
        stream = self.update_place.stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.update_place.entered():
            yield
            self._updated = stream.record_event()

    def require_updating(self) -> None:
        """Refuse a stream on which an update would not be ordered after its own inputs.

        Raises:
            RuntimeError: the calling thread is not `updating`.
        """
        stream = self.update_place.stream
        if stream is not None and torch.cuda.current_stream(self.device).cuda_stream != stream.cuda_stream:
            raise RuntimeError("an update outside `Member.updating` would race with its own inputs")

    def await_update(self) -> None:
        """Let this thread's stream wait for the last `updating`; the host goes on."""
        if self._updated is not None:
            torch.cuda.current_stream(self.device).wait_event(self._updated)

    def mark(self, place: int) -> None:
        """Note the loss sum after the row at `place` of the step: the first that is not finite is a bad row's."""
        self.marks[place].copy_(self.stats[0])

    @property
    def device(self) -> torch.device:
        """Where this drafter computes."""
        return self.stats.device


@dataclass(frozen=True)
class StepOutcome:
    """Device results of one optimizer step, identical on every drafter."""

    stats: Tensor  # float32 [stats]
    norm: Tensor  # float32 []; gradient norm before clipping
    marks: Tensor  # float32 [rows of a step]; from the first bad row of a drafter on, its rows are not finite


class Reducer:
    """Joins the members' gradients and steps the sharded optimizer."""

    def __init__(self, size: int, abort: Abort, seconds: float) -> None:
        self._members: list[Member | None] = [None] * size
        self._meeting = Meeting(size, abort, seconds)

    def join(self, index: int, member: Member) -> None:
        """Enter a drafter; before the first step."""
        self._members[index] = member

    def reduce(self, index: int) -> StepOutcome:
        """Finish the optimizer step for drafter `index`; called by every drafter's own thread, while `updating`."""
        members = [member for member in self._members if member is not None]
        own = members[index]
        own.require_updating()
        self._meeting.meet(own.device, "the end of the rows")
        sum_in_order(own.optimizer.gradient, [m.parameters.gradients[own.optimizer.slice] for m in members])
        stats = torch.empty_like(own.stats)
        sum_in_order(stats, [m.stats for m in members])
        marks = torch.empty_like(own.marks)
        sum_in_order(marks, [m.marks for m in members])
        own.square_sum.copy_(own.optimizer.square_sum())
        self._meeting.meet(own.device, "the gradient norm")
        sum_in_order(own.optimizer.total_square_sum, [m.square_sum for m in members])
        own.optimizer.total_weight.copy_(stats[1])
        norm = own.update.replay().clone()  # a graph's output holds until its next replay
        own.stats.zero_()
        own.marks.zero_()
        self._meeting.meet(own.device, "the update")
        for other in members:
            if other is not own:
                shard = other.optimizer.slice
                own.parameters.weights[shard].copy_(other.parameters.weights[shard], non_blocking=True)
        return StepOutcome(stats=stats, norm=norm, marks=marks)


def sum_in_order(out: Tensor, parts: list[Tensor]) -> None:
    """out = parts[0] + parts[1] + ..., always in that order, whatever device a part is on."""
    if out.data_ptr() != parts[0].data_ptr():
        out.copy_(parts[0], non_blocking=True)
    flat = out.view(-1)
    for part in parts[1:]:
        for piece in pieces(len(flat)):
            flat[piece].add_(part.view(-1)[piece].to(out.device, non_blocking=True))
