"""The best placement follows from two times, memory and the batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import ConfigError
from draftline.pipeline.placement import GIB, SideTimes, choose, list_options

seconds = st.floats(0.001, 10)


def small(*_: object) -> tuple[int, int]:
    return 1, 1


def names(times: SideTimes, devices: int, rows_per_step: int = 840, **memory: object) -> list[str]:
    settings = {"capacity": GIB, "bytes_of": small, **memory}
    return [o.name for o in list_options(times, devices, rows_per_step, **settings) if o.refusal is None]  # pyright: ignore


@given(seconds, seconds, st.integers(1, 9))
def test_in_turns_is_never_slower_when_it_fits(target_s: float, drafter_s: float, devices: int):
    options = list_options(SideTimes(target_s, drafter_s), devices, 840 * 11 * 13, GIB, small)
    rates = {option.name: option.rows_per_s for option in options}
    assert rates[f"colocated on {devices}"] >= max(rates.values()) * (1 - 1e-9)


@given(seconds, seconds, st.integers(2, 9))
def test_the_best_split_is_the_one_whose_slower_side_is_fastest(
    target_s: float, drafter_s: float, devices: int
):
    options = list_options(SideTimes(target_s, drafter_s), devices, 840 * 11 * 13, GIB, small)
    split = next(option for option in options if option.mode == "split")
    by_hand = max(min((devices - m) / target_s, m / drafter_s) for m in range(1, devices))
    assert split.rows_per_s == pytest.approx(by_hand)


def test_the_published_27b_case_is_five_and_three():
    times = SideTimes(target_s=0.251, drafter_s=0.169)
    split = [name for name in names(times, 8) if name.startswith("split")]
    assert split[0] == "split 5 + 3"


def test_a_placement_that_does_not_fit_is_passed_over_with_the_figures():
    def together_too_large(mode: str, *_: object) -> tuple[int, int]:
        return (3 * GIB, 3 * GIB) if mode == "colocated" else (GIB, 2 * GIB)

    options = list_options(SideTimes(1, 1), 2, 2, 2 * GIB, together_too_large)
    assert choose(options).name == "split 1 + 1"
    assert options[-1].refusal == "needs 3 GiB on a device, 2 GiB may be used"


def test_drafters_must_divide_the_rows_of_a_step():
    assert set(names(SideTimes(1, 1), 3, rows_per_step=4)) == {"split 1 + 2", "split 2 + 1"}


def test_when_nothing_fits_every_reason_is_named():
    options = list_options(SideTimes(1, 1), 2, 1, GIB, lambda *_: (5 * GIB, 5 * GIB))
    with pytest.raises(
        ConfigError, match=r"colocated on 2 .*multiple of 2 drafters; split 1 \+ 1 needs 5 GiB"
    ):
        choose(options)
