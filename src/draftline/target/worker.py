"""A target worker: a thread that turns rows into the target's states and hands them to the drafters."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from draftline.compiling.graphs import Step
from draftline.data.feed import RowFeed
from draftline.data.rows import Row
from draftline.events import DeviceEvent
from draftline.pipeline.channel import Channel
from draftline.pipeline.schedule import Schedule
from draftline.pipeline.supervise import Abort
from draftline.resilience import faults
from draftline.target.forward import TappedForward

NUM_STAGES = 2
"""Copies of the states on the target's device: one travels while the next is computed."""


class TargetWorker:
    """Rows in, states out, in row order; computes at most NUM_STAGES rows ahead of the copies."""

    def __init__(
        self,
        forward: TappedForward,
        step: Step[Tensor],
        channels: Sequence[Channel],
        schedule: Schedule,
        abort: Abort,
    ) -> None:
        self._forward, self._step = forward, step
        self._channels, self._schedule, self._abort = channels, schedule, abort
        self.wait_s = 0.0
        """Seconds spent waiting for a free slot."""
        self.rows_done = 0
        self._sender = _Sender(forward.states.buffer) if forward.device.type == "cuda" else None

    def run(self, feed: RowFeed) -> None:
        """Compute every row of the feed.

        Raises:
            StallError, AbortedError: see `Abort.wait`.
        """
        name = threading.current_thread().name
        while (row := feed.next()) is not None:
            self._abort.watchdog.beat(name, "forward", row.index)
            self._forward.load(row)
            taps = self._step.replay()
            faults.point(name, "row", row.index, taps)
            self._deliver(row)
            self.rows_done += 1

    def _deliver(self, row: Row) -> None:
        channel = self._channels[self._schedule.drafter_of(row.index)]
        begin = time.monotonic()
        slot = channel.acquire(row.index)
        self.wait_s += time.monotonic() - begin
        if self._sender is None:
            slot.buffer.copy_(self._forward.states.buffer)
        else:
            slot.written = self._sender.send(slot.buffer, slot.consumed)
        channel.publish(row)


class _Sender:
    """Peer copies on their own stream, from staging copies, so that the next row computes meanwhile."""

    def __init__(self, states: Tensor) -> None:
        self._states, self._device = states, states.device
        self._stages = [torch.empty_like(states) for _ in range(NUM_STAGES)]
        self._sent: list[DeviceEvent | None] = [None] * NUM_STAGES
        self._stream = torch.cuda.Stream(self._device)
        self._turn = 0

    def send(self, out: Tensor, free: DeviceEvent | None) -> DeviceEvent:
        """Copy the states to `out` on another device once `free` has passed; returns the event of arrival."""
        compute = torch.cuda.current_stream(self._device)
        stage, sent = self._stages[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # bounds how far this thread runs ahead of the device
            compute.wait_event(sent)
        stage.copy_(self._states)
        self._stream.wait_event(compute.record_event())
        with torch.cuda.stream(self._stream):
            if free is not None:
                self._stream.wait_event(free)
            out.copy_(stage, non_blocking=True)
            event = self._stream.record_event()
        self._sent[self._turn] = event
        self._turn = (self._turn + 1) % NUM_STAGES
        return event
