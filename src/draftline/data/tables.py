"""Block-sparse attention tables of a row, written from its anchors without ever building the mask.

Queries are the A blocks of B tokens, keys the T context tokens and then the same A*B block tokens (mask:
dflash.md 2.3). Both are cut into tiles of TILE tokens. A tile pair is absent (no query sees a key), full
(every query sees every key) or partial (the kernel evaluates the mask). The layout is the one of
`torch.nn.attention.flex_attention.BlockMask`, equal to `create_block_mask` in every entry.

Each query's context is one interval of keys, [lower, anchor), and queries of one block differ only in
`lower`, which grows with the slot. So a tile's context follows from the first and last slot of each of its
segments, a segment being the part of one block that lies in one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftline.config import TILE


@dataclass(frozen=True, eq=False)
class BlockTables:
    """The eight tensors of a BlockMask, int32 on the CPU, shapes fixed for the run.

    Counts are [1, 1, tiles]. Indices are [1, 1, tiles, tiles of the other side]: those that count, ascending,
    then the rest, ascending. `kv_*` serve the forward, `q_*` (the transpose) the backward.
    """

    kv_num_blocks: Tensor  # partial tiles
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class _Segments(NamedTuple):
    """The parts of blocks that lie in one query tile, in query order, all int64 [segments]."""

    block: np.ndarray
    tile: np.ndarray
    first_slot: np.ndarray
    last_slot: np.ndarray
    tile_starts: np.ndarray  # first segment of each tile, [tiles]


class _BlockPairs(NamedTuple):
    """Pairs of tiles that meet in a block's own keys if that block is valid, [pairs]."""

    block: np.ndarray  # int64
    query_tile: np.ndarray  # int64
    key_tile: np.ndarray  # int64
    full: np.ndarray  # bool


def block_tables(
    anchors: np.ndarray,
    anchor_valid: np.ndarray,
    document_starts: np.ndarray,
    *,
    token_budget: int,
    block_size: int,
    window: int | None,
    causal: bool,
) -> BlockTables:
    """Tables of the layers with this window and causality, in time proportional to the tiles.

    Args:
        anchors: row offsets, int64 [A]; ascending ones give the fewest tiles.
        anchor_valid: a block without a valid anchor sees nothing, bool [A].
        document_starts: first token of each anchor's document, int64 [A].
        token_budget: T, a multiple of TILE.
        block_size: B; A*B is a multiple of TILE.
        window: tokens a query sees, itself included (p_key > p_query - window); None for all.
        causal: whether a slot sees only itself and earlier slots of its block.
    """
    context = _context_tiles(
        anchors,
        anchor_valid,
        document_starts,
        token_budget=token_budget,
        block_size=block_size,
        window=window,
    )
    blocks = _block_tiles(anchor_valid, block_size, causal)
    seen, full = (np.concatenate(parts, axis=1) for parts in zip(context, blocks, strict=True))
    partial = seen & ~full
    return BlockTables(*_ordered(partial), *_ordered(full), *_ordered(partial.T), *_ordered(full.T))


def _context_tiles(
    anchors: np.ndarray,
    anchor_valid: np.ndarray,
    document_starts: np.ndarray,
    *,
    token_budget: int,
    block_size: int,
    window: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Seen and full context tiles, two bool [query tiles, T / TILE]."""
    segments = _segments(len(anchors), block_size)
    valid = anchor_valid[segments.block]
    upper = anchors[segments.block]
    start = document_starts[segments.block]
    lowest = start if window is None else np.maximum(start, upper + segments.first_slot + 1 - window)
    highest = start if window is None else np.maximum(start, upper + segments.last_slot + 1 - window)

    num_tiles = token_budget // TILE
    some = valid & (lowest < upper)
    seen = _covered(segments.tile[some], lowest[some], upper[some], len(segments.tile_starts), num_tiles)

    tile_lower = np.maximum.reduceat(highest, segments.tile_starts)
    tile_upper = np.minimum.reduceat(np.where(valid, upper, 0), segments.tile_starts)
    first_key = np.arange(0, token_budget, TILE)
    full = (tile_lower[:, None] <= first_key) & (tile_upper[:, None] >= first_key + TILE)
    return seen, full


def _covered(
    tile: np.ndarray, lower: np.ndarray, upper: np.ndarray, num_query_tiles: int, num_key_tiles: int
) -> np.ndarray:
    """Key tiles touched by any interval [lower, upper) of each query tile, bool [query tiles, key tiles]."""
    # A difference array: +1 where an interval enters, -1 in the tile after it leaves. The intervals of a
    # tile need not touch each other: a document without anchors may lie between two with some.
    width = num_key_tiles + 1
    size = num_query_tiles * width
    entered = np.bincount(tile * width + lower // TILE, minlength=size)
    left = np.bincount(tile * width + (upper - 1) // TILE + 1, minlength=size)
    return np.cumsum((entered - left).reshape(num_query_tiles, width), axis=1)[:, :-1] > 0


def _block_tiles(anchor_valid: np.ndarray, block_size: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Seen and full tiles of the block keys, two bool [query tiles, query tiles]."""
    pairs = _block_pairs(len(anchor_valid), block_size, causal)
    valid = anchor_valid[pairs.block]
    num_tiles = len(anchor_valid) * block_size // TILE
    seen = np.zeros((num_tiles, num_tiles), dtype=bool)
    seen[pairs.query_tile[valid], pairs.key_tile[valid]] = True
    full = np.zeros_like(seen)
    full[pairs.query_tile[valid], pairs.key_tile[valid]] = pairs.full[valid]
    return seen, full


@lru_cache
def _segments(num_blocks: int, block_size: int) -> _Segments:
    length = num_blocks * block_size
    assert length % TILE == 0, f"{num_blocks} blocks x {block_size} tokens is not a multiple of {TILE}"
    starts = np.union1d(np.arange(0, length, block_size), np.arange(0, length, TILE))
    lasts = np.append(starts[1:], length) - 1
    return _Segments(
        block=starts // block_size,
        tile=starts // TILE,
        first_slot=starts % block_size,
        last_slot=lasts % block_size,
        tile_starts=np.flatnonzero(starts % TILE == 0),
    )


@lru_cache
def _block_pairs(num_blocks: int, block_size: int, causal: bool) -> _BlockPairs:
    segments = _segments(num_blocks, block_size)
    first_of_block = np.searchsorted(segments.block, np.arange(num_blocks))
    partners = np.bincount(segments.block)[segments.block]
    query = np.repeat(np.arange(len(partners)), partners)
    key = np.arange(len(query)) - np.repeat(np.cumsum(partners) - partners, partners)
    key += first_of_block[segments.block[query]]
    if causal:
        visible = segments.first_slot[key] <= segments.last_slot[query]
        query, key = query[visible], key[visible]
    fills_tile = segments.last_slot - segments.first_slot + 1 == TILE
    full = fills_tile[query] & fills_tile[key]
    if causal:
        full &= segments.last_slot[key] <= segments.first_slot[query]
    return _BlockPairs(segments.block[query], segments.tile[query], segments.tile[key], full)


def _ordered(tiles: np.ndarray) -> tuple[Tensor, Tensor]:
    """Set tiles of each line, counted and listed first, int32 [1, 1, lines] and [1, 1, lines, n]."""
    counts = np.count_nonzero(tiles, axis=1).astype(np.int32)
    indices = np.argsort(np.ascontiguousarray(~tiles), axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(indices)[None, None]
