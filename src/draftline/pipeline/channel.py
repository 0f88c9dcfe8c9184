"""Bounded channel from target workers to one drafter: a ring of device slots, granted in row order.

The slot of a row follows from its number alone, so a producer that runs ahead waits for *its* slot and can
never hold one that a lower row needs; first come, first served deadlocks when producers outnumber slots.
A channel across processes would keep this interface and put the slots in shared device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftline.data.rows import Row
from draftline.events import DeviceEvent
from draftline.pipeline.supervise import Abort


@dataclass
class Slot:
    """Room for one row's states on the drafter's device, and what tells the streams when it may be touched."""

    buffer: Tensor  # that of `TargetStates`
    written: DeviceEvent | None = None
    """Recorded by the producer's stream; the drafter's stream waits for it."""
    consumed: DeviceEvent | None = None
    """Recorded by the drafter's stream; the next producer's stream waits for it."""


class Channel:
    """Rows `first`, `first + stride`, ... for one drafter, in that order."""

    def __init__(self, slots: list[Slot], first: int, stride: int, abort: Abort, seconds: float) -> None:
        self._slots = slots
        self._first, self._stride = first, stride
        self._abort, self._seconds = abort, seconds
        self._condition = abort.condition()
        self._published: dict[int, Row] = {}
        self._num_released = 0

    @property
    def fill(self) -> float:
        """Share of slots that hold a row nobody has taken yet."""
        with self._condition:
            return len(self._published) / len(self._slots)

    def acquire(self, index: int) -> Slot:
        """The slot of row `index`, once the drafter has released the row that held it before.

        Raises:
            StallError, AbortedError: see `Abort.wait`.
        """
        order = (index - self._first) // self._stride
        with self._condition:
            self._abort.wait(
                self._condition,
                lambda: order < self._num_released + len(self._slots),
                self._seconds,
                f"a free slot for row {index} (the drafter does not take rows)",
            )
        return self._slots[order % len(self._slots)]

    def publish(self, row: Row) -> None:
        """Hand over a row whose states are in its slot (or on their way there, see `Slot.written`)."""
        with self._condition:
            self._published[row.index] = row
            self._condition.notify_all()

    def take(self, index: int) -> tuple[Row, Slot]:
        """Row `index` and its slot.

        Raises:
            StallError, AbortedError: see `Abort.wait`.
        """
        with self._condition:
            self._abort.wait(
                self._condition,
                lambda: index in self._published,
                self._seconds,
                f"row {index} from its target",
            )
            row = self._published.pop(index)
        return row, self._slots[(index - self._first) // self._stride % len(self._slots)]

    def release(self) -> None:
        """Free the slot of the row taken last."""
        with self._condition:
            self._num_released += 1
            self._condition.notify_all()
