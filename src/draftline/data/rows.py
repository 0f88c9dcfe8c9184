"""Rows: the fixed-shape unit of work, a pure function of (store, shape, seed, row number).

`RowSource.row` is the way in: `packing.RowIndex` says which documents the row holds, `row_from_documents`
lays them out, `anchors` draws the anchors and writes labels and weights, `tables` the attention tables.
T = token_budget, A = block_budget, B = block_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftline.config import TILE
from draftline.data.anchors import (
    MAX_TOKEN_BUDGET,
    anchor_candidates,
    block_labels,
    block_weights,
    draw_anchors,
)
from draftline.data.document import Document, DocumentStore
from draftline.data.packing import RowIndex
from draftline.data.tables import BlockTables, block_tables
from draftline.errors import ConfigError, DataError


@dataclass(frozen=True)
class RowShape:
    """What all rows of a run have in common."""

    token_budget: int
    """T, context tokens; a multiple of 128."""
    block_budget: int
    """A, blocks; A*B is a multiple of 128."""
    block_size: int
    """B, slots of a block: the anchor and B - 1 drafts."""
    anchors_per_document: int
    """Most anchors of one document."""
    decay_gamma: float
    """Slots: weight of slot k is exp(-(k-1)/gamma)."""
    windows: tuple[tuple[int | None, bool], ...]
    """Distinct (sliding window in tokens or None, causal inside the block) of the drafter's layers."""

    def __post_init__(self) -> None:
        if self.token_budget > MAX_TOKEN_BUDGET:
            raise ConfigError(
                f"rows.token_budget={self.token_budget} is above {MAX_TOKEN_BUDGET}, the most that anchors "
                f"are drawn from; set rows.token_budget={MAX_TOKEN_BUDGET} and more rows per step"
            )


@dataclass(frozen=True, eq=False)
class Row:
    """Everything one training step needs to know of its data; tensors on the CPU."""

    index: int
    """Number of the row in the run."""
    documents: tuple[int, ...]
    """Store numbers, in order of appearance."""
    input_ids: Tensor
    """int64 [T], padding 0."""
    positions: Tensor
    """int64 [T], from 0 in each document; the padding counts from 0 like one more document."""
    document_ids: Tensor
    """int32 [T], 0, 1, .. in order of appearance, padding -1."""
    starts: tuple[int, ...]
    """First token of each document, then the end of the last."""
    anchors: Tensor
    """int64 [A], row offsets, ascending; the invalid ones are 0 and come last."""
    anchor_valid: Tensor
    """bool [A]."""
    labels: Tensor
    """int64 [A, B], token at anchor + k inside the document, else 0."""
    weights: Tensor
    """float32 [A, B], 0 where nothing is learned (slot 0, padding, from the first unsupervised label on)."""
    tables: tuple[BlockTables, ...]
    """Attention tables, one for each of `RowShape.windows`."""


class RowSource:
    """The endless sequence of rows of a run. Thread safe, and any row may be asked for at any time."""

    def __init__(self, store: DocumentStore, shape: RowShape, seed: int) -> None:
        """Look at the lengths of all documents; reads no document.

        Raises:
            DataError: the store is empty, or a document does not fit into a row.
        """
        _check_lengths(store.lengths, shape.token_budget)
        self._store = store
        self._shape = shape
        self._seed = seed
        self._index = RowIndex(store.lengths, shape.token_budget, seed)

    def row(self, index: int) -> Row:
        """Row `index` >= 0; the same for the same (store, shape, seed, index)."""
        numbers = tuple(self._index.documents(index).tolist())
        documents = [self._store.document(number) for number in numbers]
        return replace(row_from_documents(index, documents, self._shape, self._seed), documents=numbers)

    def rows_in(self, epochs: float) -> int:
        """Rows that cover that many passes over the store; exactly those passes when `epochs` is whole."""
        return self._index.rows_in(epochs)


def _check_lengths(lengths: np.ndarray, token_budget: int) -> None:
    if len(lengths) == 0:
        raise DataError(
            "the token store holds no documents; look at what `draftline prepare` dropped and why"
        )
    longest = int(np.argmax(lengths))
    length = int(lengths[longest])
    if length > token_budget:
        enough = -(-length // TILE) * TILE
        raise DataError(
            f"document {longest} has {length} tokens, more than rows.token_budget={token_budget}, and "
            f"documents are never cut; set rows.token_budget={enough} or prepare the data with "
            f"data.max_length={token_budget}"
        )


def row_from_documents(index: int, documents: Sequence[Document], shape: RowShape, seed: int) -> Row:
    """Lay out at least one document, in the given order, as row `index`.

    `Row.documents` numbers them 0, 1, ..; together they have at most T tokens.
    """
    starts = np.cumsum([0, *map(len, documents)])
    input_ids = _padded(np.concatenate([document.input_ids for document in documents]), shape.token_budget)
    supervised = np.concatenate([document.supervised for document in documents])
    blocks = _blocks(index, input_ids, supervised, starts, shape=shape, seed=seed)
    # The padding is laid out as one more document, of no number.
    lengths = np.diff(starts, append=shape.token_budget)
    numbers = np.append(np.arange(len(documents)), -1)
    return Row(
        index=index,
        documents=tuple(range(len(documents))),
        input_ids=torch.from_numpy(input_ids.astype(np.int64)),
        positions=torch.from_numpy(np.arange(shape.token_budget) - np.repeat(starts, lengths)),
        document_ids=torch.from_numpy(np.repeat(numbers, lengths).astype(np.int32)),
        starts=tuple(starts.tolist()),
        anchors=torch.from_numpy(blocks.anchors),
        anchor_valid=torch.from_numpy(blocks.valid),
        labels=torch.from_numpy(blocks.labels.astype(np.int64)),
        weights=torch.from_numpy(blocks.weights),
        tables=tuple(
            block_tables(
                blocks.anchors,
                blocks.valid,
                blocks.document_starts,
                token_budget=shape.token_budget,
                block_size=shape.block_size,
                window=window,
                causal=causal,
            )
            for window, causal in shape.windows
        ),
    )


class _Blocks(NamedTuple):
    """The blocks of a row as arrays, padded to the block budget; see `Row` for their meaning."""

    anchors: np.ndarray  # int64 [A]
    valid: np.ndarray  # bool [A]
    document_starts: np.ndarray  # int64 [A]
    labels: np.ndarray  # [A, B]
    weights: np.ndarray  # float32 [A, B]


def _blocks(
    index: int,
    input_ids: np.ndarray,
    supervised: np.ndarray,
    starts: np.ndarray,
    *,
    shape: RowShape,
    seed: int,
) -> _Blocks:
    anchors = draw_anchors(
        anchor_candidates(supervised, starts),
        starts,
        most=shape.anchors_per_document,
        block_budget=shape.block_budget,
        seed=seed,
        row=index,
    )
    document = np.searchsorted(starts, anchors, side="right") - 1
    labels = block_labels(input_ids, anchors, starts[document + 1], shape.block_size)
    weights = block_weights(supervised, starts, anchors, shape.block_size, shape.decay_gamma)
    return _Blocks(
        anchors=_padded(anchors, shape.block_budget),
        valid=np.arange(shape.block_budget) < len(anchors),
        document_starts=_padded(starts[document], shape.block_budget),
        labels=_padded(labels, shape.block_budget),
        weights=_padded(weights, shape.block_budget),
    )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """`values` [n, ..] followed by zeros, [length, ..]."""
    out = np.zeros((length, *values.shape[1:]), dtype=values.dtype)
    out[: len(values)] = values
    return out
