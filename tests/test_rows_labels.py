"""How a row is laid out, and what its blocks learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from tests.row_examples import answered, document, document_lists, row_shapes, shape


def expected_block(member: Document, anchor: int, row_shape: RowShape) -> tuple[list[int], list[float]]:
    """Labels and weights of the block at `anchor` of one document, by the definition."""
    labels, weights, learned = [], [], True
    for k in range(row_shape.block_size):
        inside = anchor + k < len(member)
        labels.append(int(member.input_ids[anchor + k]) if inside else 0)
        learned = learned and inside and (k == 0 or bool(member.supervised[anchor + k]))
        weights.append(math.exp(-(k - 1) / row_shape.decay_gamma) if learned and k else 0.0)
    return labels, weights


def blocks_of(row: Row, number: int) -> list[tuple[int, list[int], list[float]]]:
    """(anchor inside the document, labels, weights) of each block of one document of the row."""
    start, end = row.starts[number], row.starts[number + 1]
    inside = row.anchor_valid & (row.anchors >= start) & (row.anchors < end)
    return [
        (int(row.anchors[b]) - start, row.labels[b].tolist(), row.weights[b].tolist())
        for b in torch.nonzero(inside).flatten().tolist()
    ]


@settings(deadline=None)
@given(document_lists(), row_shapes, st.integers(0, 10**6))
def test_labels_and_weights_are_those_of_the_document_alone(documents, row_shape, index):
    row = row_from_documents(index, documents, row_shape, seed=0)
    for number, member in enumerate(documents):
        for anchor, labels, weights in blocks_of(row, number):
            expected_labels, expected_weights = expected_block(member, anchor, row_shape)
            assert labels == expected_labels
            assert weights == pytest.approx(expected_weights, rel=1e-6, abs=0)


@settings(deadline=None)
@given(document_lists(), row_shapes)
def test_the_weights_of_a_row_add_up_to_those_of_its_blocks(documents, row_shape):
    row = row_from_documents(0, documents, row_shape, seed=0)
    total = sum(
        sum(expected_block(documents[number], anchor, row_shape)[1])
        for number in range(len(documents))
        for anchor, _, _ in blocks_of(row, number)
    )
    assert float(row.weights.sum(dtype=torch.float64)) == pytest.approx(total, rel=1e-6)


@settings(deadline=None)
@given(document_lists(), row_shapes)
def test_every_valid_block_learns_its_first_slot_and_padding_blocks_learn_nothing(documents, row_shape):
    row = row_from_documents(0, documents, row_shape, seed=0)
    assert torch.equal(row.weights[:, 1] == 1, row.anchor_valid)
    assert not row.weights[:, 0].any()
    assert not row.weights[~row.anchor_valid].any()
    assert not row.labels[~row.anchor_valid].any()


@settings(deadline=None)
@given(document_lists(), st.integers(0, 10**6))
def test_a_document_packed_with_others_gives_the_blocks_it_gives_alone(documents, index):
    everything = shape(block_budget=256, anchors_per_document=256)
    packed = row_from_documents(index, documents, everything, seed=0)
    for number, member in enumerate(documents):
        alone = row_from_documents(0, [member], everything, seed=7)
        assert blocks_of(packed, number) == blocks_of(alone, 0)


@settings(deadline=None)
@given(document_lists(), row_shapes)
def test_the_context_is_the_documents_end_to_end_then_padding(documents, row_shape):
    row = row_from_documents(0, documents, row_shape, seed=0)
    lengths = [len(member) for member in documents]
    padding = row_shape.token_budget - sum(lengths)
    input_ids = [token for member in documents for token in member.input_ids.tolist()]
    assert row.input_ids.tolist() == input_ids + [0] * padding
    assert row.positions.tolist() == [p for length in (*lengths, padding) for p in range(length)]
    assert row.document_ids.tolist() == np.repeat([*range(len(documents)), -1], [*lengths, padding]).tolist()
    assert row.starts == (0, *np.cumsum(lengths).tolist())


@settings(deadline=None)
@given(document_lists(), row_shapes)
def test_shapes_and_types_do_not_depend_on_the_documents(documents, row_shape):
    row = row_from_documents(0, documents, row_shape, seed=0)
    tokens, blocks, slots = row_shape.token_budget, row_shape.block_budget, row_shape.block_size
    expected = {
        "input_ids": ((tokens,), torch.int64),
        "positions": ((tokens,), torch.int64),
        "document_ids": ((tokens,), torch.int32),
        "anchors": ((blocks,), torch.int64),
        "anchor_valid": ((blocks,), torch.bool),
        "labels": ((blocks, slots), torch.int64),
        "weights": ((blocks, slots), torch.float32),
    }
    for name, (size, dtype) in expected.items():
        tensor = getattr(row, name)
        assert (tuple(tensor.shape), tensor.dtype) == (size, dtype), name
        assert tensor.is_contiguous(), name


def test_an_unsupervised_token_inside_a_block_ends_what_the_block_learns():
    row = row_from_documents(0, [document([1, 1, 1, 0, 1, 1])], shape(), seed=0)
    learned = (row.weights[row.anchor_valid] > 0).int().tolist()
    assert row.anchors[row.anchor_valid].tolist() == [0, 1, 4]
    assert learned == [[0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]


def test_labels_do_not_cross_into_a_document_that_starts_supervised():
    row = row_from_documents(0, [answered(0, 3, 1), answered(0, 3, 11)], shape(), seed=0)
    assert row.labels[:2].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0, 0, 0]]
    assert (row.weights[:2] > 0).sum(dim=1).tolist() == [2, 1]


@pytest.mark.parametrize("answer", [2, 7, 8, 9])
def test_an_answer_that_ends_with_the_row_learns_up_to_its_last_token(answer: int):
    row = row_from_documents(0, [answered(256 - answer, answer)], shape(), seed=0)
    assert row.starts == (0, 256)
    assert row.anchors[row.anchor_valid].tolist() == list(range(256 - answer, 255))
    assert (row.weights[: answer - 1] > 0).sum(dim=1).tolist() == [
        min(7, remaining) for remaining in range(answer - 1, 0, -1)
    ]


def test_a_row_without_anchors_is_a_row_like_any_other():
    row = row_from_documents(0, [document([0] * 50)], shape(), seed=0)
    assert not row.anchor_valid.any()
    assert not row.weights.any()
    assert int(row.tables[0].kv_num_blocks.sum()) == 0
