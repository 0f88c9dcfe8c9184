"""Who has not moved, since when, and what every thread is doing: what a stalled run tells its user.

Workers call `beat` when they pass from one act to the next; every wait for another worker is marked by `waiting`
(pipeline/supervise.py does it for all of them), so that the cause is told from those who starve behind it. Times
are monotonic, so a clock that jumps neither hides a stall nor invents one.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from draftline.errors import StallError, blame

STARVING = 0.1
"""Share of its time that a side must wait before the progress line says so."""
LOOK_EVERY_S = 5.0
"""Seconds over which those shares are taken."""


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
    patience_s: float | None = None
    """Seconds that this act may take; None is the run's timeout."""


class Watchdog:
    """Heartbeats of all workers; every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, Beat] = {}
        self._waited: dict[str, float] = {}

    def beat(self, worker: str, what: str, row: int, *, waiting: bool = False) -> None:
        """Record that `worker` has just begun `what` for `row`."""
        # Replacing one entry of a dict is atomic, so workers share no lock.
        self._beats[worker] = Beat(worker, what, row, waiting, self._clock())

    def leave(self, worker: str) -> None:
        """Forget a worker that has ended as it should, or that has nothing to do."""
        self._beats.pop(worker, None)

    @contextmanager
    def waiting(self, worker: str, what: str, patience_s: float | None = None) -> Iterator[None]:
        """Mark a wait for others inside an act of `worker`, which then goes on; one without an act is not watched."""
        act = self._beats.get(worker)
        if act is None:
            yield
            return
        begin = self._clock()
        self._beats[worker] = Beat(worker, what, act.row, True, begin, patience_s)
        try:
            yield
        finally:
            now = self._clock()
            self._waited[worker] = self._waited.get(worker, 0.0) + now - begin
            self._beats[worker] = replace(act, since=now)

    def row_of(self, worker: str) -> int | None:
        """Row of the worker's last beat."""
        beat = self._beats.get(worker)
        return None if beat is None else beat.row

    def waited(self) -> dict[str, float]:
        """Seconds that each living worker has spent in `waiting` so far, the wait it is in included."""
        now, total = self._clock(), self._waited.copy()
        return {
            beat.worker: total.get(beat.worker, 0.0) + (now - beat.since if beat.waiting else 0.0)
            for beat in self._snapshot()
        }

    def stalled(self, timeout_s: float) -> list[Beat]:
        """Workers without a beat for `timeout_s` seconds, the longest silent first."""
        now = self._clock()
        late = [beat for beat in self._snapshot() if now - beat.since > (beat.patience_s or timeout_s)]
        return sorted(late, key=lambda beat: beat.since)

    def require_progress(self, timeout_s: float, depths: Callable[[], str] = str) -> None:
        """Raise when a worker has stalled in an act of its own, or when all of them wait for each other.

        A worker that waits behind one that is slow but moves is no stall.

        Args:
            depths: what lies in the queues, for the report.

        Raises:
            StallError: names the cause, who waits for it, and holds the stack of every thread.
        """
        stalled = self.stalled(timeout_s)
        causes = [beat for beat in stalled if not beat.waiting]
        if not causes and len(stalled) < len(self._beats):
            return
        if not stalled:
            return
        # those behind it had its last rows to work on, so they have waited for less long
        behind = [beat for beat in self.stalled(timeout_s / 2) if beat.waiting]
        told = [*causes, *behind] if causes else stalled
        error = StallError(f"no progress for {timeout_s:g} s: {self.describe(told)}", self.dump(depths()))
        blame(error, (causes or stalled)[0].worker, (causes or stalled)[0].row)
        raise error

    def describe(self, beats: list[Beat]) -> str:
        """One sentence: who is stuck in what, and who only waits for others."""
        now = self._clock()
        stuck = [_line(beat, now) for beat in beats if not beat.waiting]
        starving = [_line(beat, now) for beat in beats if beat.waiting]
        if not stuck:
            return "all of them wait for each other: " + "; ".join(starving)
        return "; ".join(stuck) + (f". Starving behind: {'; '.join(starving)}" if starving else "")

    def dump(self, depths: str = "") -> str:
        """Every worker's last beat, the queues and every thread's stack, as text."""
        now = self._clock()
        beats = "".join(
            f"  {_line(beat, now)}\n" for beat in sorted(self._snapshot(), key=lambda beat: beat.worker)
        )
        queues = f"queues:\n  {depths}\n" if depths else ""
        return f"workers:\n{beats}{queues}threads:\n{thread_stacks()}"

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


class Starvation:
    """Which side waits for which, as a few words for the progress line; renewed every few seconds."""

    def __init__(self, watchdog: Watchdog, clock: Callable[[], float] = time.monotonic) -> None:
        self._watchdog, self._clock = watchdog, clock
        self._since, self._before, self._words = clock(), watchdog.waited(), ""

    def words(self) -> str:
        """What `starving` says of the last full period."""
        seconds = self._clock() - self._since
        if seconds >= LOOK_EVERY_S:
            waited = self._watchdog.waited()
            self._words = starving(
                {
                    worker: (total - self._before.get(worker, 0.0)) / seconds
                    for worker, total in waited.items()
                }
            )
            self._since, self._before = self._clock(), waited
        return self._words


def starving(shares: Mapping[str, float]) -> str:
    """Words for the share of its time that each worker waited; empty when nobody waits much.

    The worker that waits least on the side that is waited for is the slow one, and is named.
    """
    drafters = {name: share for name, share in shares.items() if name.startswith("drafter-")}
    targets = {name: share for name, share in shares.items() if name.startswith("target-")}
    if not drafters or not targets:
        return ""
    drafter_share, target_share = min(drafters.values()), min(targets.values())
    if min(drafter_share, target_share) > STARVING:
        return f"drafters wait {drafter_share:.0%} and targets {target_share:.0%} of the time"
    if drafter_share > STARVING:
        return (
            f"drafters wait {drafter_share:.0%} of the time, behind {min(targets, key=lambda n: targets[n])}"
        )
    if target_share > STARVING:
        return (
            f"targets wait {target_share:.0%} of the time, behind {min(drafters, key=lambda n: drafters[n])}"
        )
    return ""
