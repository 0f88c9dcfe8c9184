"""Worker threads under one supervisor: the first failure wins, everything stops, the cause is shown.

Every wait in the pipeline goes through `Abort.wait`, which has a deadline, ends at once when any worker has
failed, and tells the watchdog that this worker only waits. A failure elsewhere surfaces in the other workers as
`AbortedError`; those are consequences and are listed as such.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftline.errors import StallError, blame
from draftline.resilience.watchdog import Watchdog, thread_stacks


class AbortedError(Exception):
    """Another worker failed first; this one stops too."""


@dataclass(frozen=True)
class Failure:
    """What ended a run: which worker, and why."""

    worker: str
    error: BaseException


class Abort:
    """One switch for all waits of a run, and the watchdog that hears of them."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog or Watchdog()
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []
        self._raised = threading.Event()

    @property
    def raised(self) -> bool:
        """Whether the run is ending."""
        return self._raised.is_set()

    def condition(self) -> threading.Condition:
        """A new condition whose waiters wake when the run is aborted."""
        condition = threading.Condition()
        with self._lock:
            self._conditions.append(condition)
        return condition

    def raise_now(self) -> None:
        """End the run: wake every waiter."""
        self._raised.set()
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raise AbortedError if the run is ending; for loops that compute without waiting."""
        if self.raised:
            raise AbortedError

    def wait(
        self,
        condition: threading.Condition,
        ready: Callable[[], bool],
        seconds: float,
        what: str,
        patience_s: float | None = None,
    ) -> None:
        """Wait, holding `condition`, until `ready()`.

        Args:
            what: the thing waited for, as the error names it: "row 17 from target-0".
            patience_s: seconds that the watchdog grants this wait; None is the run's timeout.

        Raises:
            AbortedError: the run is ending.
            StallError: `seconds` passed.
        """
        if not ready():
            with self.watchdog.waiting(threading.current_thread().name, what, patience_s):
                self._wait(condition, ready, seconds, what)
        self.check()

    def _wait(
        self, condition: threading.Condition, ready: Callable[[], bool], seconds: float, what: str
    ) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise StallError(
                    f"{threading.current_thread().name} waited {seconds:g} s for {what}; "
                    "raise deadlines.stall_timeout_s if that is expected",
                    thread_stacks(),
                )
            condition.wait(left)


class Supervisor:
    """Starts workers, records the first failure, and joins them all."""

    def __init__(self, abort: Abort) -> None:
        self.abort = abort
        self.failures: list[Failure] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread called `name`."""
        thread = threading.Thread(target=self._guard, args=(name, work), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except AbortedError:
            pass  # the cause is recorded by the worker that failed first
        except BaseException as error:  # noqa: BLE001 - the one place that catches everything
            blame(error, name, self.abort.watchdog.row_of(name))
            self.fail(name, error)
        self.abort.watchdog.leave(name)

    @property
    def running(self) -> bool:
        """Whether any worker is still at work."""
        return any(thread.is_alive() for thread in self._threads)

    def fail(self, worker: str, error: BaseException) -> None:
        """Record a failure and end the run."""
        with self._lock:
            self.failures.append(Failure(worker, error))
        self.abort.raise_now()

    def join(self, seconds: float) -> None:
        """Wait for every worker; after an abort they get `seconds` to leave, then are named as stuck.

        Raises:
            The first failure's error, with the worker's name added as a note.
        """
        while self.running and not self.abort.raised:
            for thread in self._threads:
                thread.join(0.05)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if not self.failures:
            return
        first = self.failures[0]
        blame(first.error, first.worker)
        for later in self.failures[1:]:
            first.error.add_note(f"then {later.worker}: {later.error}")
        if stuck:
            first.error.add_note(f"did not stop within {seconds:.0f} s: {', '.join(stuck)}")
        raise first.error
