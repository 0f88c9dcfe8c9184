"""Block-sparse tables against the dense mask, entry by entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from draftline.config import TILE
from draftline.data.tables import BlockTables, block_tables
from draftline.drafter.mask import mask_mod

BLOCK_SIZES = (2, 5, 7, 8, 10, 16, 24, 32, 128, 192, 256)


@dataclass(frozen=True)
class Blocks:
    """Documents of given lengths laid end to end, and anchors among their tokens."""

    lengths: tuple[int, ...]
    anchors: np.ndarray  # int64 [A]
    valid: np.ndarray  # bool [A]
    token_budget: int
    block_size: int

    @property
    def document_ids(self) -> np.ndarray:  # [T]
        padding = self.token_budget - sum(self.lengths)
        return np.repeat([*range(len(self.lengths)), -1], [*self.lengths, padding])

    @property
    def document_starts(self) -> np.ndarray:  # [A]
        return np.searchsorted(self.document_ids[: sum(self.lengths)], self.document_ids[self.anchors])

    @property
    def positions(self) -> np.ndarray:  # [T]
        padding = self.token_budget - sum(self.lengths)
        return np.concatenate([np.arange(length) for length in (*self.lengths, padding)])

    def tables(self, window: int | None, causal: bool) -> BlockTables:
        return block_tables(
            self.anchors,
            self.valid,
            self.document_starts,
            token_budget=self.token_budget,
            block_size=self.block_size,
            window=window,
            causal=causal,
        )


def dense_mask(blocks: Blocks, window: int | None, causal: bool) -> np.ndarray:
    """dflash.md 2.3 for every pair, bool [A*B, T + A*B]."""
    a, size, context_len = blocks.anchors, blocks.block_size, blocks.token_budget
    doc, pos = blocks.document_ids, blocks.positions
    visible = np.zeros((len(a) * size, context_len + len(a) * size), dtype=bool)
    keys = np.arange(context_len)
    for query in range(len(a) * size):
        b, off = divmod(query, size)
        if not blocks.valid[b]:
            continue
        context = (keys < a[b]) & (doc == doc[a[b]])
        if window is not None:
            context &= pos >= pos[a[b]] + off - (window - 1)
        visible[query, :context_len] = context
        own = context_len + b * size
        visible[query, own : own + (off + 1 if causal else size)] = True
    return visible


def tile_kinds(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Partial and full tiles of a dense mask, two bool [query tiles, key tiles]."""
    tiles = mask.reshape(mask.shape[0] // TILE, TILE, mask.shape[1] // TILE, TILE)
    some, every = np.asarray(tiles.any(axis=(1, 3))), np.asarray(tiles.all(axis=(1, 3)))
    return some & ~every, every


def listed(counts: torch.Tensor, indices: torch.Tensor) -> np.ndarray:
    """The tiles that a table names, bool [lines, n]."""
    lines, n = indices.shape[2:]
    named = np.zeros((lines, n), dtype=bool)
    for line in range(lines):
        named[line, indices[0, 0, line, : counts[0, 0, line]].numpy()] = True
    return named


def assert_tables_are_exact(blocks: Blocks, window: int | None, causal: bool) -> None:
    partial, full = tile_kinds(dense_mask(blocks, window, causal))
    tables = blocks.tables(window, causal)
    assert np.array_equal(listed(tables.kv_num_blocks, tables.kv_indices), partial)
    assert np.array_equal(listed(tables.full_kv_num_blocks, tables.full_kv_indices), full)
    assert np.array_equal(listed(tables.q_num_blocks, tables.q_indices), partial.T)
    assert np.array_equal(listed(tables.full_q_num_blocks, tables.full_q_indices), full.T)


@st.composite
def block_layouts(draw) -> Blocks:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    unit = TILE // math.gcd(TILE, block_size)
    num_blocks = unit * draw(st.integers(1, max(1, 512 // (unit * block_size))))
    token_budget = TILE * draw(st.integers(1, 4))
    lengths: list[int] = []
    while sum(lengths) < token_budget and draw(st.booleans() if lengths else st.just(True)):
        lengths.append(draw(st.integers(1, token_budget - sum(lengths))))
    offsets = st.integers(0, sum(lengths) - 1)
    drawn = draw(st.lists(offsets, max_size=num_blocks))
    # Many anchors close together is what real rows look like; few far apart is the other extreme.
    run = draw(st.integers(0, num_blocks - len(drawn)))
    first = draw(offsets)
    drawn += [min(first + step, sum(lengths) - 1) for step in range(run)]
    anchors = np.zeros(num_blocks, dtype=np.int64)
    anchors[: len(drawn)] = sorted(drawn)
    return Blocks(tuple(lengths), anchors, np.arange(num_blocks) < len(drawn), token_budget, block_size)


windows = st.one_of(st.none(), st.integers(2, 600))


@settings(deadline=None, max_examples=150)
@given(block_layouts(), windows, st.booleans())
def test_a_tile_is_absent_partial_or_full_exactly_as_the_dense_mask_says(blocks, window, causal):
    assert_tables_are_exact(blocks, window, causal)


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_window_edge_may_fall_on_any_token_of_a_tile(block_size: int):
    num_blocks = 128 // block_size
    blocks = Blocks((384,), np.full(num_blocks, 300), np.ones(num_blocks, dtype=bool), 384, block_size)
    for window in range(block_size, 384):
        assert_tables_are_exact(blocks, window, causal=True)


def test_an_anchor_may_fall_on_any_token_of_a_tile():
    for anchor in range(300):
        blocks = Blocks((300,), np.full(8, anchor), np.ones(8, dtype=bool), 384, 16)
        assert_tables_are_exact(blocks, window=None, causal=False)


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_valid_block_may_be_any_and_may_lie_across_tiles(causal: bool):
    for num_valid in (0, 1, 18, 19, 36, 37, 54, 55, 73, 128):
        blocks = Blocks((100,), np.zeros(128, dtype=np.int64), np.arange(128) < num_valid, 128, 7)
        assert_tables_are_exact(blocks, window=None, causal=causal)


@settings(deadline=None, max_examples=8)
@given(block_layouts(), windows, st.booleans())
def test_tables_equal_those_that_torch_makes_from_the_visibility_rule(blocks, window, causal):
    rule = mask_mod(
        torch.from_numpy(blocks.anchors),
        torch.from_numpy(blocks.valid),
        torch.from_numpy(blocks.document_ids),
        torch.from_numpy(blocks.positions),
        block_size=blocks.block_size,
        window=window,
        causal=causal,
    )
    num_queries = len(blocks.anchors) * blocks.block_size
    reference = create_block_mask(
        rule, 1, 1, num_queries, blocks.token_budget + num_queries, device="cpu", BLOCK_SIZE=TILE
    )
    for name, tensor in vars(blocks.tables(window, causal)).items():
        expected = getattr(reference, name)
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected), name


def test_tables_make_a_block_mask_with_its_transpose():
    blocks = Blocks((100, 120), np.arange(5, 21), np.arange(16) < 12, 256, 8)
    tables = blocks.tables(None, False)
    mask = BlockMask.from_kv_blocks(
        tables.kv_num_blocks, tables.kv_indices, tables.full_kv_num_blocks, tables.full_kv_indices
    )
    assert mask.shape == (1, 1, 128, 256 + 128)
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(tables, name), getattr(mask, name)), name


@pytest.mark.parametrize("block_size", [128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_that_fills_tiles_makes_full_tiles_of_its_own_keys(block_size: int, causal: bool):
    num_blocks = 512 // block_size
    blocks = Blocks((128,), np.full(num_blocks, 60), np.ones(num_blocks, dtype=bool), 128, block_size)
    full = listed(blocks.tables(None, causal).full_kv_num_blocks, blocks.tables(None, causal).full_kv_indices)
    per_block = block_size // TILE
    expected = per_block * (per_block - 1) // 2 if causal else per_block**2
    assert full.sum() == num_blocks * expected
    assert_tables_are_exact(blocks, None, causal)


def test_a_document_without_anchors_between_two_with_some_is_not_visited():
    anchors = np.array([100, 110, *[600] * 6])
    blocks = Blocks((128, 384, 128), anchors, np.ones(8, dtype=bool), 640, 16)
    partial = listed(blocks.tables(None, False).kv_num_blocks, blocks.tables(None, False).kv_indices)
    assert partial[0, :5].tolist() == [True, False, False, False, True]


def test_blocks_without_an_anchor_visit_no_tile():
    blocks = Blocks((256,), np.zeros(32, dtype=np.int64), np.zeros(32, dtype=bool), 256, 16)
    tables = blocks.tables(None, False)
    counts = (tables.kv_num_blocks, tables.full_kv_num_blocks, tables.q_num_blocks, tables.full_q_num_blocks)
    assert all(int(count.sum()) == 0 for count in counts)


def test_sorted_anchors_of_a_long_document_leave_few_partial_tiles():
    # dflash.md 2.9: S = 4096, 512 sorted anchors: 18.6 % of the tiles visited, 13 % of those partial.
    rng = np.random.default_rng(0)
    anchors = np.sort(rng.choice(4096, 512, replace=False))
    blocks = Blocks((4096,), anchors, np.ones(512, dtype=bool), 4096, 16)
    tables = blocks.tables(None, False)
    partial, full = int(tables.kv_num_blocks.sum()), int(tables.full_kv_num_blocks.sum())
    total = (8192 // TILE) * ((4096 + 8192) // TILE)
    assert (partial + full) / total == pytest.approx(0.186, abs=0.01)
    assert partial / (partial + full) == pytest.approx(0.13, abs=0.03)
