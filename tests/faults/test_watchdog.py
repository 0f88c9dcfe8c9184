"""A stall is found on monotonic time, told apart from starvation, and shown with every thread's stack."""

from __future__ import annotations

import threading

import pytest

from draftline.errors import StallError
from draftline.watchdog import Watchdog, thread_stacks


class Clock:
    """Monotonic seconds set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(clock)


def test_a_worker_that_beats_is_never_stalled_however_long_the_run(watchdog: Watchdog, clock: Clock) -> None:
    for row in range(100):
        watchdog.beat("target-0", "forward", row)
        clock.now += 119
        watchdog.require_progress(120)


def test_the_longest_silent_worker_comes_first(watchdog: Watchdog, clock: Clock) -> None:
    for worker in ("drafter-0", "target-0", "target-1"):
        watchdog.beat(worker, "step", 7)
        clock.now += 60
    assert [beat.worker for beat in watchdog.stalled(70)] == ["drafter-0", "target-0"]
    assert watchdog.stalled(1000) == []


def test_the_stall_names_the_cause_before_those_who_starve_behind_it(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.beat("drafter-0", "waiting for a row", 17, waiting=True)
    clock.now += 1
    watchdog.beat("target-1", "forward", 17)
    clock.now += 125
    with pytest.raises(StallError) as caught:
        watchdog.require_progress(120)
    first = str(caught.value).splitlines()[0]
    assert first == (
        "no progress for 120 s: target-1 in 'forward' of row 17 for 125.0 s. "
        "Starving behind: drafter-0 in 'waiting for a row' of row 17 for 126.0 s"
    )
    assert caught.value.exit_code == 6


def test_workers_that_all_wait_for_each_other_are_told_as_such(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("drafter-0", "waiting for a row", 17, waiting=True)
    watchdog.beat("target-0", "waiting for a slot", 20, waiting=True)
    clock.now += 200
    with pytest.raises(StallError, match="all of them wait for each other: drafter-0"):
        watchdog.require_progress(120)


def test_a_worker_that_has_left_is_not_missed(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("target-0", "forward", 1)
    watchdog.leave("target-0")
    watchdog.leave("target-0")
    clock.now += 1000
    watchdog.require_progress(120)


def test_the_dump_shows_where_every_thread_is_by_name(watchdog: Watchdog) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stuck_in_a_kernel() -> None:
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=stuck_in_a_kernel, name="target-3")
    thread.start()
    assert inside.wait(5)
    watchdog.beat("target-3", "forward", 5)
    text = watchdog.dump()
    leave.set()
    thread.join(5)
    assert "target-3 in 'forward' of row 5" in text
    assert "  target-3:\n" in text
    assert "stuck_in_a_kernel" in text
    assert "  MainThread:\n" in text


def test_stacks_show_no_values_of_variables() -> None:
    password = "hunter2-hunter2"
    assert password not in thread_stacks().replace('password = "hunter2-hunter2"', "")


def test_beating_from_many_threads_loses_nobody(watchdog: Watchdog) -> None:
    def beat(number: int) -> None:
        for row in range(500):
            watchdog.beat(f"worker-{number}", "step", row)
            watchdog.stalled(10)

    threads = [threading.Thread(target=beat, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {beat.row for beat in watchdog.stalled(-1)} == {499}
    assert len(watchdog.stalled(-1)) == 8
