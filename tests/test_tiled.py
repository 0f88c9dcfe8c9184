"""Attention tile by tile against attention with the whole mask, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftline.config import TILE
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.mask import block_mask_dense, mask_mod
from draftline.drafter.tiled import query_tiles, tile_mask, tiled_attend

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@dataclass(frozen=True)
class Layout:
    """A packed row without its tensors of meaning: who is where."""

    anchors: Tensor  # int64 [A]
    anchor_valid: Tensor  # bool [A]
    document_ids: Tensor  # int32 [S]
    positions: Tensor  # int64 [S]
    block_size: int

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.anchors, self.anchor_valid, self.document_ids, self.positions


def layout(
    lengths: list[int], anchors: list[int], num_padding: int, num_invalid: int, block_size: int
) -> Layout:
    document_ids = [d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * num_padding
    positions = [p for length in [*lengths, num_padding] for p in range(length)]
    return Layout(
        anchors=torch.tensor(anchors + [0] * num_invalid, dtype=torch.int64),
        anchor_valid=torch.tensor([True] * len(anchors) + [False] * num_invalid, dtype=torch.bool),
        document_ids=torch.tensor(document_ids, dtype=torch.int32),
        positions=torch.tensor(positions),
        block_size=block_size,
    )


@st.composite
def layouts(draw) -> Layout:
    """Documents of 1 to 60 tokens, any anchors, block sizes that do and do not divide a tile, some padding."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    num_tokens = sum(lengths)
    block_size = draw(st.sampled_from([2, 5, 7, 10, 16, 48, 130]))
    anchors = draw(st.sets(st.integers(0, num_tokens - 1), max_size=max(3, 300 // block_size)))
    num_invalid = draw(st.integers(0 if anchors else 1, 3))
    return layout(lengths, sorted(anchors), draw(st.integers(0, 9)), num_invalid, block_size)


kinds = st.one_of(
    st.just((None, False)),
    st.tuples(st.integers(130, 200), st.booleans()),  # windows at least as long as the longest block
    st.just((None, True)),
)


def heads(num_heads: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_heads, length, HEAD_DIM, generator=generator, dtype=torch.float64)


def both(row: Layout, window: int | None, causal: bool):
    """The tiled attention and the dense one of one layer."""
    rule = {"block_size": row.block_size, "window": window, "causal": causal}
    tiles = query_tiles(row.anchors, row.anchor_valid, row.positions, row.block_size)
    tiled = tiled_attend(tiles, [mask_mod(*row.inputs, **rule)], len(row.positions))
    return tiled, sdpa_attend([block_mask_dense(*row.inputs, **rule)])


def run(attend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output, and the gradients of a random projection of it for q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(0, *leaves)
    if not out.requires_grad:  # no tile at all: nothing was looked at
        return out, *(torch.zeros_like(x) for x in leaves)
    loss = (out * heads(HEADS, q.shape[1], 9)).sum()
    return out.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)


@given(layouts(), kinds)
@settings(max_examples=60, deadline=None)
def test_tiles_equal_the_whole_mask_forward_and_backward(row: Layout, kind: tuple[int | None, bool]):
    num_queries = len(row.anchors) * row.block_size
    num_keys = len(row.positions) + num_queries
    q, k, v = heads(HEADS, num_queries, 0), heads(KV_HEADS, num_keys, 1), heads(KV_HEADS, num_keys, 2)
    tiled, dense = both(row, *kind)
    for ours, whole in zip(run(tiled, q, k, v), run(dense, q, k, v), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [(12, True), (12, False), (None, False)])
def test_a_window_shorter_than_a_document_cuts_the_same_keys(kind: tuple[int | None, bool]):
    row = layout([40, 3, 57], [0, 11, 12, 25, 39, 40, 43, 60, 99], 4, 2, block_size=10)
    num_queries, num_keys = 110, 104 + 110
    q, k, v = heads(HEADS, num_queries, 3), heads(KV_HEADS, num_keys, 4), heads(KV_HEADS, num_keys, 5)
    tiled, dense = both(row, *kind)
    for ours, whole in zip(run(tiled, q, k, v), run(dense, q, k, v), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-10)


@given(layouts(), kinds)
@settings(max_examples=60, deadline=None)
def test_what_tiles_leave_out_is_masked_for_all_their_queries(row: Layout, kind: tuple[int | None, bool]):
    window, causal = kind
    rule = {"block_size": row.block_size, "window": window, "causal": causal}
    whole = block_mask_dense(*row.inputs, **rule)
    num_context = len(row.positions)
    seen = torch.zeros_like(whole)
    for tile in query_tiles(row.anchors, row.anchor_valid, row.positions, row.block_size):
        part = tile_mask(mask_mod(*row.inputs, **rule), tile, num_context, torch.device("cpu"))
        width = tile.context.stop - tile.context.start
        seen[tile.queries, tile.context] = part[:, :width]
        own = slice(num_context + tile.queries.start, num_context + tile.queries.stop)
        seen[tile.queries, own] = part[:, width:]
    assert torch.equal(seen, whole)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_tiles_cover_every_valid_block_once_and_hold_whole_blocks(row: Layout):
    tiles = query_tiles(row.anchors, row.anchor_valid, row.positions, row.block_size)
    covered = [q for tile in tiles for q in range(tile.queries.start, tile.queries.stop)]
    assert covered == list(range(int(row.anchor_valid.sum()) * row.block_size))
    for tile in tiles:
        length = tile.queries.stop - tile.queries.start
        assert length % row.block_size == 0
        assert length <= max(TILE, row.block_size)


def test_a_row_without_any_anchor_gives_zeros():
    row = layout([20], [], 0, 4, block_size=8)
    q, k, v = heads(HEADS, 32, 0), heads(KV_HEADS, 52, 1), heads(KV_HEADS, 52, 2)
    tiled, _ = both(row, window=None, causal=False)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in run(tiled, q, k, v))
