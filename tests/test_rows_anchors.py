"""Which tokens become anchors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.anchors import anchor_quotas
from draftline.data.rows import row_from_documents
from tests.row_examples import answered, document, document_lists, row_shapes, shape


def candidates_of(mask: np.ndarray) -> list[int]:
    return [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]


@settings(deadline=None)
@given(document_lists(), row_shapes, st.integers(0, 10**6), st.integers(0, 2**32 - 1))
def test_anchors_are_sorted_distinct_supervised_pairs_of_one_document(documents, row_shape, index, seed):
    row = row_from_documents(index, documents, row_shape, seed)
    anchors = row.anchors[row.anchor_valid].tolist()
    allowed = {
        start + a
        for start, member in zip(row.starts, documents, strict=False)
        for a in candidates_of(member.supervised)
    }
    assert set(anchors) <= allowed
    assert anchors == sorted(set(anchors))


@settings(deadline=None)
@given(document_lists(), row_shapes, st.integers(0, 10**6))
def test_invalid_anchors_are_zero_and_come_last(documents, row_shape, index):
    row = row_from_documents(index, documents, row_shape, seed=0)
    valid = row.anchor_valid.tolist()
    assert valid == sorted(valid, reverse=True)
    assert not row.anchors[~row.anchor_valid].any()


def anchors_by_document(row, documents) -> list[int]:
    anchors = row.anchors[row.anchor_valid].numpy()
    return (
        np.histogram(anchors, bins=np.array(row.starts))[0].tolist() if len(anchors) else [0] * len(documents)
    )


@settings(deadline=None)
@given(document_lists(), row_shapes, st.integers(0, 10**6))
def test_each_document_gets_its_share_of_the_block_budget(documents, row_shape, index):
    row = row_from_documents(index, documents, row_shape, seed=0)
    got = anchors_by_document(row, documents)
    wanted = [
        min(row_shape.anchors_per_document, len(candidates_of(member.supervised))) for member in documents
    ]
    assert sum(got) == min(row_shape.block_budget, sum(wanted))
    assert all(has <= want for has, want in zip(got, wanted, strict=True))
    # Whoever got less than it wanted got no less than anyone else, but for the remainder of one.
    cut = [has for has, want in zip(got, wanted, strict=True) if has < want]
    assert not cut or min(cut) >= max(got) - 1


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 400), st.data()
)
def test_quotas_are_those_of_dealing_one_anchor_at_a_time(available, most, budget, data):
    ties = np.array(data.draw(st.permutations(range(len(available)))), dtype=np.uint64)
    dealt = [0] * len(available)
    while sum(dealt) < budget:
        open_to = [d for d in range(len(available)) if dealt[d] < min(available[d], most)]
        if not open_to:
            break
        poorest = min(dealt[d] for d in open_to)
        dealt[min((d for d in open_to if dealt[d] == poorest), key=lambda d: ties[d])] += 1
    assert anchor_quotas(np.array(available), most, budget, ties).tolist() == dealt


def test_what_a_full_document_leaves_over_is_spent_on_the_others():
    ties = np.arange(3, dtype=np.uint64)
    assert anchor_quotas(np.array([2, 2, 100]), 100, 8, ties).tolist() == [2, 2, 4]


def test_the_remainder_of_a_budget_goes_to_no_document_more_often_than_to_another():
    documents = [answered(4, 40) for _ in range(5)]
    counts = np.zeros(5)
    for index in range(400):
        row = row_from_documents(index, documents, shape(windows=()), seed=0)
        counts += np.array(anchors_by_document(row, documents)) - 6  # 32 blocks: 6 each and 2 over
    assert counts.sum() == 800
    assert np.abs(counts - 160).max() < 50


def test_anchors_are_drawn_uniformly():
    counts = np.zeros(100)
    for index in range(2000):
        row = row_from_documents(index, [answered(0, 101)], shape(windows=()), seed=0)
        counts[row.anchors[row.anchor_valid].numpy()] += 1
    expected = 2000 * 32 / 100
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 99 + 6 * np.sqrt(2 * 99)


def test_another_row_or_seed_draws_other_anchors_of_the_same_documents():
    documents = [answered(10, 100)]
    rows = [
        row_from_documents(index, documents, shape(), seed)
        for index, seed in ((0, 0), (1, 0), (2, 0), (0, 1))
    ]
    assert len({tuple(row.anchors.tolist()) for row in rows}) == len(rows)


def test_the_first_token_of_an_answer_is_a_candidate_and_the_last_is_not():
    row = row_from_documents(0, [answered(20, 10)], shape(), seed=0)
    assert row.anchors[row.anchor_valid].tolist() == list(range(20, 29))


@pytest.mark.parametrize(
    ("supervised", "anchors"),
    [
        ([0, 0, 0, 0], []),
        ([0, 0, 1, 0], []),
        ([0, 0, 0, 1], []),
        ([1], []),
        ([1, 1], [0]),
        ([0, 1, 1, 0], [1]),
        ([1, 0, 1, 0], []),
        ([0, 1, 0, 1, 1], [3]),
    ],
)
def test_a_document_with_few_supervised_tokens_gives_the_anchors_it_can(supervised, anchors):
    row = row_from_documents(0, [document(supervised)], shape(), seed=0)
    assert row.anchors[row.anchor_valid].tolist() == anchors


def test_the_last_token_of_a_document_is_no_anchor_even_if_the_next_one_starts_supervised():
    row = row_from_documents(0, [document([1, 1]), document([1, 1])], shape(), seed=0)
    assert row.anchors[row.anchor_valid].tolist() == [0, 2]


def test_the_anchors_of_a_row_never_change_between_versions():
    row = row_from_documents(3, [answered(5, 60), answered(9, 90)], shape(block_budget=16), seed=1)
    assert row.anchors.tolist() == [5, 11, 13, 21, 24, 26, 51, 54, 83, 92, 105, 124, 129, 133, 141, 154]
