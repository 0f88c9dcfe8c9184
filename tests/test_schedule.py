"""Which worker does which row, and how drafters agree on where to stop."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import ConfigError
from draftline.pipeline.schedule import Schedule, StopLine

schedules = st.builds(
    lambda steps, per_drafter, targets, drafters, first: Schedule(
        num_steps=first + steps,
        rows_per_step=per_drafter * drafters,
        num_targets=targets,
        num_drafters=drafters,
        first_step=first,
    ),
    steps=st.integers(1, 5),
    per_drafter=st.integers(1, 4),
    targets=st.integers(1, 6),
    drafters=st.integers(1, 5),
    first=st.integers(0, 4),
)


def all_rows(schedule: Schedule) -> list[int]:
    return list(range(schedule.first_row, schedule.num_steps * schedule.rows_per_step))


@given(schedules)
def test_every_row_is_computed_by_one_target_in_ascending_order(schedule: Schedule):
    rows = [list(schedule.rows_of_target(target)) for target in range(schedule.num_targets)]
    assert all(own == sorted(own) for own in rows)
    assert sorted(row for own in rows for row in own) == all_rows(schedule)


@given(schedules)
def test_every_row_is_learned_once_by_the_drafter_it_was_sent_to(schedule: Schedule):
    learned = []
    for step in range(schedule.first_step, schedule.num_steps):
        shares = [schedule.rows_of_drafter(drafter, step) for drafter in range(schedule.num_drafters)]
        assert len({len(share) for share in shares}) == 1  # all drafters do equally much
        assert sorted(row for share in shares for row in share) == list(schedule.rows_of_step(step))
        for drafter, share in enumerate(shares):
            assert all(schedule.drafter_of(row) == drafter for row in share)
        learned += schedule.rows_of_step(step)
    assert learned == all_rows(schedule)


@given(schedules)
def test_a_drafters_rows_are_a_fixed_distance_apart_from_its_first_on(schedule: Schedule):
    """What a channel's ring of slots counts on."""
    for drafter in range(schedule.num_drafters):
        steps = range(schedule.first_step, schedule.num_steps)
        rows = [row for step in steps for row in schedule.rows_of_drafter(drafter, step)]
        first = schedule.first_row_of_drafter(drafter)
        assert rows == list(range(first, first + len(rows) * schedule.num_drafters, schedule.num_drafters))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_colocated_targets_compute_what_their_own_drafter_learns(workers: int, per_drafter: int, first: int):
    schedule = Schedule(first + 3, per_drafter * workers, workers, workers, first)
    for worker in range(workers):
        learned = [row for step in range(first, first + 3) for row in schedule.rows_of_drafter(worker, step)]
        assert list(schedule.rows_of_target(worker)) == learned


@given(schedules)
def test_a_resumed_run_does_the_rows_that_the_unbroken_one_had_left(schedule: Schedule):
    unbroken = Schedule(
        schedule.num_steps, schedule.rows_per_step, schedule.num_targets, schedule.num_drafters
    )
    for target in range(schedule.num_targets):
        left = [row for row in unbroken.rows_of_target(target) if row >= schedule.first_row]
        assert list(schedule.rows_of_target(target)) == left


@pytest.mark.parametrize(("rows", "drafters", "advice"), [(8, 3, "6 or 9"), (2, 3, "3"), (7, 2, "6 or 8")])
def test_rows_that_do_not_divide_over_the_drafters_are_refused_with_the_next_ones(rows, drafters, advice):
    with pytest.raises(ConfigError, match=f"rows_per_step={rows} .*{drafters} drafters; use {advice}$"):
        Schedule(1, rows, 1, drafters)


def lock_step(stop_line: StopLine, drafters: int, num_steps: int, request_at: int, draw: random.Random):
    """Ask for each drafter in turn as threads would: none begins a step before all have ended the one before."""
    reached, stopped = [0] * drafters, [False] * drafters
    newest_at_request = None
    for turn in range(drafters * (num_steps + 1)):
        if turn == request_at:
            stop_line.request()
            newest_at_request = max(reached)
        ready = [d for d in range(drafters) if not stopped[d] and reached[d] == min(reached)]
        if not ready:
            break
        drafter = draw.choice(ready)
        if reached[drafter] < num_steps and stop_line.may_start(reached[drafter]):
            reached[drafter] += 1
        else:
            stopped[drafter] = True
    return reached, newest_at_request


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 24), st.integers(0, 2**32 - 1))
def test_all_drafters_stop_after_the_same_step_whenever_the_stop_is_asked_for(
    drafters: int, num_steps: int, request_at: int, seed: int
):
    reached, newest = lock_step(StopLine(), drafters, num_steps, request_at, random.Random(seed))
    assert len(set(reached)) == 1
    if newest is not None:
        assert reached[0] == newest  # the step that some had begun is finished, and no other begun


def test_nobody_stops_unasked():
    line = StopLine()
    assert all(line.may_start(step) for step in (3, 3, 4, 4, 5))


def test_a_stop_asked_for_before_the_first_step_lets_none_begin():
    line = StopLine()
    line.request()
    assert not line.may_start(7)
    assert not line.may_start(7)
