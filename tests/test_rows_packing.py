"""Which documents a row holds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.packing import WINDOW_DOCUMENTS, RowIndex, pack

lengths_and_budget = st.integers(1, 500).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), min_size=1, max_size=60), st.just(budget))
)


@given(lengths_and_budget)
def test_packing_holds_every_item_once_and_never_more_than_the_budget(case):
    lengths, budget = np.array(case[0]), case[1]
    rows = pack(lengths, lengths, budget)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(0 < lengths[row].sum() <= budget for row in rows)


@given(lengths_and_budget)
def test_packing_opens_no_row_while_another_has_room(case):
    lengths, budget = np.array(case[0]), case[1]
    fills = sorted(int(lengths[row].sum()) for row in pack(lengths, lengths, budget))
    # Two rows at most half full would have been one.
    assert sum(fill <= budget // 2 for fill in fills) <= 1


def test_packing_puts_an_item_where_it_fits_best():
    # 60 and 70 open rows; 30 fits both and fills the second exactly.
    assert pack(np.array([60, 70, 30]), np.array([3, 2, 1]), 100) == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("mean", "sigma", "num_documents"),
    [(6.5, 0.8, 4096), (6.0, 1.2, 4096), (7.3, 0.6, 4096), (6.5, 0.8, 400)],
    ids=["chat", "mixed", "reasoning", "small store"],
)
def test_rows_of_real_length_mixes_are_more_than_97_percent_full(mean, sigma, num_documents):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(mean, sigma, num_documents), 20, 4096).astype(np.int32)
    num_rows = RowIndex(lengths, 4096, seed=0).rows_in(1.0)
    assert lengths.sum() / (num_rows * 4096) > 0.97


def documents_of_pass(index: RowIndex, epoch: int) -> list[int]:
    rows = range(index.rows_in(epoch) if epoch else 0, index.rows_in(epoch + 1))
    return [number for row in rows for number in index.documents(row).tolist()]


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_every_pass_holds_each_document_exactly_once(lengths: list[int], seed: int, epoch: int):
    index = RowIndex(np.array(lengths, dtype=np.int32), 100, seed)
    assert sorted(documents_of_pass(index, epoch)) == list(range(len(lengths)))


@pytest.mark.parametrize("num_documents", [WINDOW_DOCUMENTS, WINDOW_DOCUMENTS + 1, 3 * WINDOW_DOCUMENTS - 1])
def test_every_pass_over_several_windows_holds_each_document_exactly_once(num_documents: int):
    lengths = np.random.default_rng(1).integers(1, 1000, num_documents, dtype=np.int32)
    index = RowIndex(lengths, 1024, seed=5)
    passes = [documents_of_pass(index, epoch) for epoch in (0, 1, 2)]
    assert all(sorted(numbers) == list(range(num_documents)) for numbers in passes)


@pytest.mark.parametrize("num_documents", [500, 3 * WINDOW_DOCUMENTS])
def test_each_pass_brings_other_documents_together(num_documents: int):
    lengths = np.random.default_rng(1).lognormal(6.5, 0.8, num_documents).clip(20, 4096).astype(np.int32)
    index = RowIndex(lengths, 4096, seed=5)
    first, second = index.rows_in(1), index.rows_in(2)
    earlier, later = (
        {frozenset(index.documents(row).tolist()) for row in rows}
        for rows in (range(first), range(first, second))
    )
    # A document that fills a row by itself does so in every pass.
    assert sum(len(row) > 1 for row in earlier & later) < 0.15 * first


def test_rows_do_not_come_from_long_documents_to_short_ones():
    lengths = np.random.default_rng(2).integers(10, 1000, 1000, dtype=np.int32)
    index = RowIndex(lengths, 1000, seed=0)
    longest = [int(lengths[index.documents(row)].max()) for row in range(index.rows_in(1.0))]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.15


def test_a_store_of_one_document_gives_that_document_for_ever():
    index = RowIndex(np.array([7], dtype=np.int32), 128, seed=0)
    assert [index.documents(row).tolist() for row in (0, 1, 999)] == [[0], [0], [0]]
    assert index.rows_in(3) == 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.floats(0, 5))
def test_rows_in_is_the_fewest_rows_that_hold_so_many_documents(lengths: list[int], epochs: float):
    index = RowIndex(np.array(lengths, dtype=np.int32), 100, seed=3)
    wanted = max(1, round(epochs * len(lengths)))
    held, rows = 0, 0
    while held < wanted:
        held += len(index.documents(rows))
        rows += 1
    assert index.rows_in(epochs) == rows


def test_rows_are_the_same_in_any_order_of_asking_and_from_any_thread():
    lengths = np.random.default_rng(3).integers(1, 500, 5000, dtype=np.int32)
    forward = RowIndex(lengths, 512, seed=9)
    expected = [forward.documents(row).tolist() for row in range(3000)]
    shared = RowIndex(lengths, 512, seed=9)
    wrong: list[int] = []

    def ask(seed: int) -> None:
        for row in np.random.default_rng(seed).permutation(3000)[:300].tolist():
            if shared.documents(row).tolist() != expected[row]:
                wrong.append(row)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_the_documents_of_a_row_never_change_between_versions():
    index = RowIndex(np.arange(1, 41, dtype=np.int32), 64, seed=0)
    assert [index.documents(row).tolist() for row in (0, 1, 20)] == [[33, 29], [18, 17, 16, 9], [37, 25]]
