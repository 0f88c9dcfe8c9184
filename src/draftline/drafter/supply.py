"""How a drafter gets its next row and the target's states: from a channel, or from a target on its own device."""

from __future__ import annotations

import threading
import time
from typing import Protocol

import torch
from torch import Tensor

from draftline.compiling.graphs import Step
from draftline.data.feed import RowFeed
from draftline.data.rows import Row
from draftline.data.transfer import DeviceRow
from draftline.errors import StallError
from draftline.pipeline.channel import Channel
from draftline.resilience import faults
from draftline.target.forward import TappedForward
from draftline.target.states import TargetStates


class Supply(Protocol):
    """Brings rows, and the target's states of them, to the addresses that a drafter's step reads."""

    wait_s: float
    """Seconds spent waiting for rows."""

    def load(self, index: int) -> Row:
        """Put row `index` and its states in place, on the current stream."""
        ...


class ChannelSupply:
    """Split placement: the states come from target workers."""

    def __init__(self, channel: Channel, device_row: DeviceRow, states: TargetStates) -> None:
        self._channel, self._device_row, self._buffer = channel, device_row, states.buffer
        self.wait_s = 0.0

    def load(self, index: int) -> Row:
        """See `Supply`."""
        begin = time.monotonic()
        row, slot = self._channel.take(index)
        self.wait_s += time.monotonic() - begin
        device = self._buffer.device
        if slot.written is not None:
            torch.cuda.current_stream(device).wait_event(slot.written)
        self._buffer.copy_(slot.buffer, non_blocking=True)
        if device.type == "cuda":
            slot.consumed = torch.cuda.current_stream(device).record_event()
        self._channel.release()
        self._device_row.load(row)
        return row


class LocalSupply:
    """Colocated placement: this worker runs the target itself, in turn with the drafter."""

    def __init__(
        self, feed: RowFeed, forward: TappedForward, step: Step[Tensor], device_row: DeviceRow
    ) -> None:
        self._feed, self._forward, self._step, self._device_row = feed, forward, step, device_row
        self.wait_s = 0.0

    def load(self, index: int) -> Row:
        """See `Supply`. The step reads `forward.states` itself."""
        begin = time.monotonic()
        row = self._feed.next()
        self.wait_s += time.monotonic() - begin
        if row is None or row.index != index:
            raise StallError(
                f"the feed gave row {None if row is None else row.index} where row {index} was due"
            )
        self._forward.load(row)
        taps = self._step.replay()
        faults.point(threading.current_thread().name, "row", row.index, taps)
        self._device_row.load(row)
        return row
