"""Rows of a store: pure in their number, whole passes, errors that say what to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from draftline.data.rows import Row, RowSource
from draftline.drafter.mask import mask_mod
from draftline.errors import ConfigError, DataError
from tests.row_examples import MemoryStore, document, shape, store_of_lengths

WINDOWS = ((None, False), (64, True), (64, False))


def same(first: Row, second: Row) -> bool:
    """Bit for bit, tables included."""

    def equal(left: object, right: object) -> bool:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            return torch.equal(left, right)
        return left == right

    tables = zip(first.tables, second.tables, strict=True)
    plain = [name for name in vars(first) if name != "tables"]
    return all(equal(getattr(first, name), getattr(second, name)) for name in plain) and all(
        equal(value, getattr(right, name)) for left, right in tables for name, value in vars(left).items()
    )


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 256), min_size=1, max_size=20), st.integers(0, 2**32 - 1), st.data())
def test_a_row_is_a_function_of_its_number(lengths: list[int], seed: int, data):
    store = store_of_lengths(lengths)
    one, other = (RowSource(store, shape(windows=WINDOWS), seed) for _ in range(2))
    numbers = data.draw(st.permutations(range(8)))
    rows = {number: one.row(number) for number in numbers}
    assert all(same(other.row(number), rows[number]) for number in range(8))


def test_threads_that_share_a_source_get_the_rows_of_one_that_is_alone():
    store = store_of_lengths(np.random.default_rng(0).integers(1, 200, 3000).tolist())
    alone = RowSource(store, shape(), seed=1)
    expected = [alone.row(number) for number in range(200)]
    shared = RowSource(store, shape(), seed=1)
    order = np.random.default_rng(1).permutation(200).tolist()
    with ThreadPoolExecutor(4) as pool:
        got = dict(zip(order, pool.map(shared.row, order), strict=True))
    assert all(same(got[number], expected[number]) for number in range(200))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 256), min_size=1, max_size=30), st.integers(0, 3))
def test_each_pass_holds_every_document_of_the_store_once_and_unchanged(lengths: list[int], epoch: int):
    store = store_of_lengths(lengths)
    source = RowSource(store, shape(), seed=0)
    first = source.rows_in(epoch) if epoch else 0
    seen: list[int] = []
    for number in range(first, source.rows_in(epoch + 1)):
        row = source.row(number)
        assert row.index == number
        for place, name in enumerate(row.documents):
            tokens = row.input_ids[row.starts[place] : row.starts[place + 1]]
            assert np.array_equal(tokens, store.document(name).input_ids)
        seen += row.documents
    assert sorted(seen) == list(range(len(lengths)))


def test_a_document_is_anchored_anew_in_each_pass():
    source = RowSource(store_of_lengths([200]), shape(), seed=0)
    anchors = {tuple(source.row(number).anchors.tolist()) for number in range(6)}
    assert len(anchors) == 6


def test_the_tables_of_a_row_are_those_of_its_anchors_and_documents():
    source = RowSource(store_of_lengths([90, 60, 50, 41, 30, 256]), shape(windows=WINDOWS), seed=2)
    for number in range(3):
        row = source.row(number)
        for (window, causal), tables in zip(WINDOWS, row.tables, strict=True):
            rule = mask_mod(
                row.anchors,
                row.anchor_valid,
                row.document_ids,
                row.positions,
                block_size=8,
                window=window,
                causal=causal,
            )
            reference = create_block_mask(rule, 1, 1, 256, 512, device="cpu", BLOCK_SIZE=128)
            assert all(torch.equal(value, getattr(reference, name)) for name, value in vars(tables).items())


def test_a_document_that_fills_a_row_exactly_is_accepted():
    row = RowSource(store_of_lengths([256]), shape(), seed=0).row(0)
    assert row.starts == (0, 256)
    assert not (row.document_ids < 0).any()


def test_a_document_longer_than_a_row_is_named_with_what_to_do():
    with pytest.raises(DataError) as raised:
        RowSource(store_of_lengths([10, 300, 20]), shape(), seed=0)
    message = str(raised.value)
    assert "document 1 has 300 tokens" in message
    assert "rows.token_budget=256" in message
    assert "set rows.token_budget=384" in message
    assert "data.max_length=256" in message


def test_an_empty_store_is_an_error():
    with pytest.raises(DataError, match="no documents"):
        RowSource(MemoryStore([]), shape(), seed=0)


def test_a_row_too_long_to_draw_anchors_from_is_refused():
    with pytest.raises(ConfigError, match="token_budget=2097152"):
        shape(token_budget=1 << 21)


def test_documents_that_are_equal_are_different_documents():
    twins = [document([0, 1, 1, 1], first_token=1) for _ in range(4)]
    row = RowSource(MemoryStore(twins), shape(), seed=0).row(0)
    assert sorted(row.documents) == [0, 1, 2, 3]
    assert int(row.anchor_valid.sum()) == 8
