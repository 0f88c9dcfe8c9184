"""A stall is found on monotonic time, told apart from starvation, and shown with every thread's stack."""

from __future__ import annotations

import threading

import pytest

from draftline.errors import Blame, StallError, blame_of
from draftline.resilience.watchdog import LOOK_EVERY_S, Starvation, Watchdog, starving, thread_stacks


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
    assert blame_of(caught.value) == Blame("target-1", 17)
    assert "threads:" in (caught.value.stacks or "")


def test_those_behind_are_named_though_the_last_rows_kept_them_busy_for_longer(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.beat("target-1", "forward", 17)
    clock.now += 20
    watchdog.beat("drafter-0", "waiting for a row", 17, waiting=True)
    clock.now += 80
    watchdog.beat("drafter-1", "waiting for a row", 18, waiting=True)  # of late: that is no starving yet
    clock.now += 25
    with pytest.raises(
        StallError, match=r"target-1 in .forward.*Starving behind: drafter-0 [^;]* for 105\.0 s\n"
    ):
        watchdog.require_progress(120)


def test_workers_that_all_wait_for_each_other_are_told_as_such(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("drafter-0", "waiting for a row", 17, waiting=True)
    watchdog.beat("target-0", "waiting for a slot", 20, waiting=True)
    clock.now += 200
    with pytest.raises(StallError, match="all of them wait for each other: drafter-0"):
        watchdog.require_progress(120)


def test_a_worker_behind_one_that_is_slow_but_moves_is_no_stall(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("drafter-0", "waiting for a row", 17, waiting=True)
    clock.now += 119
    watchdog.beat("target-0", "forward", 17)
    clock.now += 119
    watchdog.require_progress(120)


def test_a_wait_that_may_be_long_has_its_own_patience(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("drafter-0", "step", 4)
    with watchdog.waiting("drafter-0", "the disk", patience_s=600):
        clock.now += 500
        watchdog.require_progress(120)
        clock.now += 101
        with pytest.raises(StallError, match="drafter-0 in 'the disk' of row 4 for 601"):
            watchdog.require_progress(120)


def test_after_a_wait_the_worker_is_in_its_own_act_again(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("target-0", "forward", 4)
    clock.now += 100
    with watchdog.waiting("target-0", "a slot"):
        clock.now += 100
    clock.now += 100
    watchdog.require_progress(120)
    clock.now += 21
    with pytest.raises(StallError, match="target-0 in 'forward' of row 4 for 121"):
        watchdog.require_progress(120)


def test_the_wait_of_a_thread_that_is_not_watched_is_nobodys(watchdog: Watchdog, clock: Clock) -> None:
    with watchdog.waiting("loader-0", "rows to build"):
        clock.now += 1000
        watchdog.require_progress(120)
    assert watchdog.waited() == {}


def test_waits_add_up_and_the_running_one_counts(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.beat("drafter-0", "step", 0)
    with watchdog.waiting("drafter-0", "a row"):
        clock.now += 3
    with watchdog.waiting("drafter-0", "a row"):
        clock.now += 4
        assert watchdog.waited() == {"drafter-0": 7}


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (
            {"drafter-0": 0.4, "target-0": 0.5, "target-1": 0.02},
            "drafters wait 40% of the time, behind target-1",
        ),
        (
            {"drafter-0": 0.03, "drafter-1": 0.3, "target-0": 0.6},
            "targets wait 60% of the time, behind drafter-0",
        ),
        ({"drafter-0": 0.4, "target-0": 0.5}, "drafters wait 40% and targets 50% of the time"),
        ({"drafter-0": 0.05, "target-0": 0.08}, ""),
        ({"drafter-0": 0.5, "drafter-1": 0.5}, ""),
    ],
)
def test_the_side_that_starves_is_told_with_the_one_it_waits_for(
    shares: dict[str, float], words: str
) -> None:
    assert starving(shares) == words


def test_starvation_is_measured_over_the_last_few_seconds(watchdog: Watchdog, clock: Clock) -> None:
    for worker in ("drafter-0", "target-0"):
        watchdog.beat(worker, "step", 0)
    look = Starvation(watchdog, clock)
    with watchdog.waiting("drafter-0", "a row"):
        clock.now += LOOK_EVERY_S / 2
        assert look.words() == ""
        clock.now += LOOK_EVERY_S / 2
    assert look.words() == "drafters wait 100% of the time, behind target-0"
    clock.now += LOOK_EVERY_S
    assert look.words() == ""


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
