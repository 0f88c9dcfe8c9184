"""The supervisor and its waits by themselves; whole runs that fail are in test_pipeline_failures.py."""

from __future__ import annotations

import threading
import time

import pytest

from draftline.errors import StallError
from draftline.pipeline.supervise import Abort, AbortedError, Supervisor


def start_blocked(supervisor: Supervisor, name: str) -> None:
    """A worker that waits for something that never comes."""
    condition = supervisor.abort.condition()

    def work() -> None:
        with condition:
            supervisor.abort.wait(condition, lambda: False, 30, "nothing")

    supervisor.start(name, work)


def wait_for(event: threading.Event) -> None:
    event.wait(10)


def fail(message: str) -> None:
    raise ValueError(message)


def test_the_first_failure_is_the_cause_and_later_ones_are_its_consequences():
    supervisor = Supervisor(Abort())
    second = threading.Event()

    def late() -> None:
        second.wait(5)
        raise KeyError("because of the first")

    supervisor.start("late", late)
    start_blocked(supervisor, "blocked")
    supervisor.start("early", lambda: fail("the cause"))
    while not supervisor.failures:
        time.sleep(0.001)
    second.set()
    with pytest.raises(ValueError, match="the cause") as error:
        supervisor.join(5)
    assert error.value.__notes__ == ["worker: early", "then late: 'because of the first'"]
    assert not supervisor.running


def test_even_an_exit_inside_a_worker_ends_the_run():
    supervisor = Supervisor(Abort())
    start_blocked(supervisor, "blocked")

    def leave() -> None:
        raise SystemExit(3)

    supervisor.start("leaver", leave)
    with pytest.raises(SystemExit):
        supervisor.join(5)


def test_workers_that_all_end_well_raise_nothing():
    supervisor, done = Supervisor(Abort()), []
    for index in range(3):
        supervisor.start(f"worker-{index}", lambda i=index: done.append(i))
    supervisor.join(5)
    assert sorted(done) == [0, 1, 2]


def test_a_worker_that_does_not_leave_is_named():
    supervisor, release = Supervisor(Abort()), threading.Event()
    supervisor.start("deaf", lambda: wait_for(release))
    supervisor.fail("main", ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause") as error:
        supervisor.join(0.1)
    release.set()
    assert error.value.__notes__ == ["worker: main", "did not stop within 0 s: deaf"]


def test_a_wait_that_passed_its_deadline_says_who_waited_for_what_and_how_to_allow_it():
    abort = Abort()
    condition = abort.condition()
    with condition, pytest.raises(StallError) as error:
        abort.wait(condition, lambda: False, 0.02, "row 17 from target-0")
    assert str(error.value) == (
        "MainThread waited 0.02 s for row 17 from target-0; raise deadlines.stall_timeout_s if that is expected"
    )


def test_a_condition_made_after_the_abort_lets_nobody_wait():
    abort = Abort()
    abort.raise_now()
    condition = abort.condition()
    with condition, pytest.raises(AbortedError):
        abort.wait(condition, lambda: True, 30, "anything")


def test_an_abort_wakes_many_waiters_at_once():
    supervisor = Supervisor(Abort())
    for index in range(20):
        start_blocked(supervisor, f"blocked-{index}")
    time.sleep(0.05)
    begin = time.monotonic()
    supervisor.abort.raise_now()
    supervisor.join(5)
    assert time.monotonic() - begin < 1
    assert not supervisor.running
