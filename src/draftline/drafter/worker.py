"""A drafter worker: a thread that learns from its rows and meets the other drafters once a step."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.config import OptimConfig
from draftline.drafter.step import AccumulatingStep
from draftline.drafter.supply import Supply
from draftline.errors import NonFiniteError, blame
from draftline.optim import learning_rate
from draftline.pipeline.reduce import Member, Reducer, StepOutcome
from draftline.pipeline.schedule import Schedule, StopLine
from draftline.resilience import faults
from draftline.resilience.watchdog import Watchdog


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did, on the host."""

    step: int
    stats: Tensor  # float32 [stats]
    grad_norm: float
    lr: float
    num_tokens: int
    """Target tokens in this drafter's rows, padding excluded."""
    rows: range
    marks: Tensor  # float32 [rows of the step], see `StepOutcome`


class _Reading:
    """A step's results on their way to the host; read one step late, so that no step waits for its own."""

    def __init__(
        self, outcome: StepOutcome, host: Tensor, step: int, lr: float, num_tokens: int, rows: range
    ) -> None:
        """`host` float32 [1 + marks + stats] is pinned and belongs to this reading until `finish`."""
        self._meta = (step, lr, num_tokens, rows)
        self._num_marks = len(outcome.marks)
        source = torch.cat([outcome.norm[None], outcome.marks, outcome.stats])
        self._host = host.copy_(source, non_blocking=True)
        on_cuda = source.is_cuda
        self._event = torch.cuda.current_stream(source.device).record_event() if on_cuda else None

    def finish(self) -> StepRecord:
        """Wait for the copy and read it."""
        if self._event is not None:
            self._event.synchronize()
        step, lr, num_tokens, rows = self._meta
        norm, marks, stats = self._host.clone().tensor_split([1, 1 + self._num_marks])
        return StepRecord(step, stats, float(norm), lr, num_tokens, rows, marks)


class DrafterWorker:
    """The loop of one drafter; all logic lies in the step, the supply and the reducer."""

    def __init__(
        self,
        index: int,
        supply: Supply,
        step: AccumulatingStep,
        reducer: Reducer,
        member: Member,
        schedule: Schedule,
        config: OptimConfig,
        stop_line: StopLine,
        watchdog: Watchdog,
        on_record: Callable[[StepRecord], None],
        is_boundary: Callable[[int], bool],
        at_boundary: Callable[[int], None],
        on_bad_step: Callable[[int], None],
    ) -> None:
        """`on_record` gets every finished step; `at_boundary(step)` runs after a step that `is_boundary`,
        once that step is known to be sound; `on_bad_step(step)` before the error of one that is not finite."""
        self._index, self._supply, self._step = index, supply, step
        self._reducer, self._member = reducer, member
        self._schedule, self._config, self._stop_line = schedule, config, stop_line
        self._watchdog, self._on_record = watchdog, on_record
        self._is_boundary, self._at_boundary, self._on_bad_step = is_boundary, at_boundary, on_bad_step
        # one reading is under way while the next begins; pinned memory asked for anew each step is never given back
        size = 1 + len(member.marks) + len(member.stats)
        self._host = itertools.cycle(torch.empty(2, size, pin_memory=member.stats.is_cuda).unbind())

    def run(self) -> None:
        """Train from the schedule's first step until its last, or until a stop was asked for.

        Raises:
            NonFiniteError: a gradient was not finite; its update was withheld.
            StallError, AbortedError: see `Abort.wait`.
        """
        unread: _Reading | None = None
        for step in range(self._schedule.first_step, self._schedule.num_steps):
            if not self._stop_line.may_start(step):
                break
            reading = self._train(step)
            if unread is not None:
                self._report(unread.finish())
            unread = reading
            if self._is_boundary(step):
                self._report(unread.finish())
                unread = None
                self._at_boundary(step)
        if unread is not None:
            record = unread.finish()
            self._report(record)
            self._at_boundary(record.step)

    def _train(self, step: int) -> _Reading:
        name, rows = threading.current_thread().name, self._schedule.rows_of_drafter(self._index, step)
        self._watchdog.beat(name, "step", rows[0])
        faults.point(name, "step", step)
        num_tokens, first = 0, self._schedule.rows_of_step(step).start
        for index in rows:
            self._watchdog.beat(name, "step", index)
            row = self._supply.load(index)
            if index == rows[0]:
                self._member.await_update()  # which the load of this row ran beside
            self._step.replay(first=index == rows[0])
            self._member.mark(index - first)
            num_tokens += row.starts[-1]
        lr = learning_rate(self._config, step, self._schedule.num_steps)
        with self._member.updating():
            self._member.optimizer.lr.fill_(lr)
            return _Reading(self._reducer.reduce(self._index), next(self._host), step, lr, num_tokens, rows)

    def _report(self, record: StepRecord) -> None:
        figures = torch.cat([record.stats, record.marks, torch.tensor([record.grad_norm])])
        if figures.isfinite().all():
            self._on_record(record)
            return
        self._on_bad_step(record.step)
        raise _bad_step(record, self._schedule)


def _bad_step(record: StepRecord, schedule: Schedule) -> NonFiniteError:
    """The error of a step that is not finite; every drafter that raises it blames the same worker and row."""
    rows = schedule.rows_of_step(record.step)
    row = first_bad_row(record.marks, rows)
    what = f"the gradient of rows {rows.start}..{rows.stop - 1}" if row is None else f"the loss of row {row}"
    error = NonFiniteError(
        f"step {record.step}: {what} is not finite, gradient norm {record.grad_norm}; the update was withheld"
    )
    if row is not None:
        blame(error, f"drafter-{schedule.drafter_of(row)}", row)
    return error


def first_bad_row(marks: Tensor, rows: range) -> int | None:
    """The lowest row whose own loss is not finite; None when only the gradient is not.

    Args:
        marks: float32 [rows of the step], each drafter's running loss sum after each of its rows.
    """
    # a drafter's later rows are bad only because its sum runs on, so only the lowest is sure
    return next(
        (row for row, mark in zip(rows, marks.tolist(), strict=True) if not math.isfinite(mark)), None
    )
