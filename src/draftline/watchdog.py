"""Who has not moved, since when, and what every thread is doing: what a stalled run tells its user.

Workers call `beat` when they pass from one act to the next. Times are monotonic, so a clock that jumps
neither hides a stall nor invents one.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from draftline.errors import StallError


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a worker."""

    worker: str
    what: str
    """What it began, such as `forward` or `waiting for a row`."""
    row: int
    waiting: bool
    """Whether that depends on another worker, so that this one is a victim and not the cause."""
    since: float
    """Monotonic seconds."""


class Watchdog:
    """Heartbeats of all workers; every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, Beat] = {}

    def beat(self, worker: str, what: str, row: int, *, waiting: bool = False) -> None:
        """Record that `worker` has just begun `what` for `row`."""
        # Replacing one entry of a dict is atomic, so workers share no lock.
        self._beats[worker] = Beat(worker, what, row, waiting, self._clock())

    def leave(self, worker: str) -> None:
        """Forget a worker that has ended as it should."""
        self._beats.pop(worker, None)

    def stalled(self, timeout_s: float) -> list[Beat]:
        """Workers without a beat for `timeout_s` seconds, the longest silent first."""
        latest = self._clock() - timeout_s
        return sorted((beat for beat in self._snapshot() if beat.since < latest), key=lambda beat: beat.since)

    def require_progress(self, timeout_s: float) -> None:
        """Raise when a worker has stalled.

        Raises:
            StallError: names the cause, who waits for it, and shows the stack of every thread.
        """
        stalled = self.stalled(timeout_s)
        if stalled:
            raise StallError(f"no progress for {timeout_s:g} s: {self.describe(stalled)}\n{self.dump()}")

    def describe(self, beats: list[Beat]) -> str:
        """One sentence: who is stuck in what, and who only waits for others."""
        now = self._clock()
        stuck = [_line(beat, now) for beat in beats if not beat.waiting]
        starving = [_line(beat, now) for beat in beats if beat.waiting]
        if not stuck:
            return "all of them wait for each other: " + "; ".join(starving)
        return "; ".join(stuck) + (f". Starving behind: {'; '.join(starving)}" if starving else "")

    def dump(self) -> str:
        """Every worker's last beat and every thread's stack, as text."""
        now = self._clock()
        beats = "".join(
            f"  {_line(beat, now)}\n" for beat in sorted(self._snapshot(), key=lambda beat: beat.worker)
        )
        return f"workers:\n{beats}threads:\n{thread_stacks()}"

    def _snapshot(self) -> list[Beat]:
        return list(self._beats.copy().values())


def _line(beat: Beat, now: float) -> str:
    return f"{beat.worker} in '{beat.what}' of row {beat.row} for {now - beat.since:.1f} s"


def thread_stacks() -> str:
    """The Python stack of every thread of this process, by thread name; no values of variables."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"  {names.get(ident, 'a thread that Python did not start')}:\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]
    return "".join(parts)
