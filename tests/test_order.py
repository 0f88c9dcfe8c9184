"""Order and randomness that follow from numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.data.order import Purpose, raw_draws, shuffled

MASK64 = (1 << 64) - 1


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Philox as published (Salmon et al. 2011), in plain integers."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first = 0xD2E7470EE14C6C93 * counter[0]
        second = 0xCA5A826395121157 * counter[2]
        counter = [
            second >> 64 ^ counter[1] ^ key[0],
            second & MASK64,
            first >> 64 ^ counter[3] ^ key[1],
            first & MASK64,
        ]
        key = [key[0] + 0x9E3779B97F4A7C15 & MASK64, key[1] + 0xBB67AE8584CAA73B & MASK64]
    return counter


def test_the_reference_philox_gives_the_published_known_answer():
    answer = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox_4x64_10([0, 0, 0, 0], [0, 0]) == answer


def test_raw_draws_are_philox_keyed_by_seed_and_purpose():
    draws = raw_draws(12345, Purpose.ANCHORS, 7, 8, 9, n=6)
    key = [12345, int(Purpose.ANCHORS)]
    blocks = philox_4x64_10([1, 7, 8, 9], key) + philox_4x64_10([2, 7, 8, 9], key)
    assert draws.dtype == np.uint64
    assert draws.tolist() == blocks[:6]


def test_the_numbers_of_the_purposes_never_change():
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "DOCUMENT_ORDER": 1,
        "ROW_ORDER": 2,
        "ANCHORS": 3,
        "PACKING": 4,
    }


def test_every_argument_changes_the_draws():
    streams = [
        raw_draws(0, Purpose.ANCHORS, 1, n=4),
        raw_draws(1, Purpose.ANCHORS, 1, n=4),
        raw_draws(0, Purpose.ROW_ORDER, 1, n=4),
        raw_draws(0, Purpose.ANCHORS, 2, n=4),
        raw_draws(0, Purpose.ANCHORS, 0, 1, n=4),
    ]
    assert len({tuple(stream.tolist()) for stream in streams}) == len(streams)


def test_asking_for_more_draws_keeps_the_first_ones():
    longer = raw_draws(3, Purpose.ROW_ORDER, 5, n=100)
    assert np.array_equal(longer[:7], raw_draws(3, Purpose.ROW_ORDER, 5, n=7))


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_a_shuffle_is_a_permutation_of_any_size(size: int, seed: int, epoch: int):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(st.integers(1, 10**7), st.integers(0, 2**32 - 1), st.data())
def test_a_position_of_a_shuffle_does_not_depend_on_the_others_asked_for(size: int, seed: int, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = shuffled(positions, size, seed, epoch=4)
    alone = [int(shuffled(positions[i : i + 1], size, seed, epoch=4)[0]) for i in range(len(positions))]
    assert together.tolist() == alone
    assert 0 <= together.min() <= together.max() < size


def test_epochs_and_seeds_shuffle_differently():
    orders = [tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == len(orders)


def test_the_order_of_a_run_never_changes_between_versions():
    assert shuffled(np.arange(8), 1000, seed=0, epoch=0).tolist() == [167, 590, 231, 15, 706, 548, 900, 686]


@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_every_document_comes_to_every_position_about_equally_often(size: int):
    trials = 600
    counts = np.zeros((size, size))
    for epoch in range(trials):
        counts[np.arange(size), shuffled(np.arange(size), size, 1, epoch)] += 1
    expected = trials / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_in_the_store_are_not_neighbours_in_a_shuffle():
    order = shuffled(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert (np.abs(np.diff(order)) == 1).sum() < 20
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
