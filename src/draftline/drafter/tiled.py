"""SDPA over a packed row on a CPU, tile by tile: exact, with the boolean mask of `mask.py`.

A tile of queries needs only the context from its first anchor's document to its last anchor, and its own
blocks; everything else is masked for all of them. Cutting it away makes the cost follow documents instead of
the square of the row. Spans are read on the host, which is free on a CPU and would stall a GPU.

Legend: H = query heads, KV = key/value heads, Q = A * B queries, S = context tokens, hd = head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftline.config import TILE
from draftline.drafter.attention import Attend
from draftline.drafter.mask import MaskMod


@dataclass(frozen=True)
class Tile:
    """Some neighbouring queries and the keys that any of them may see."""

    queries: slice  # of Q; the same slice of the block keys is visible
    context: slice  # of S


def query_tiles(anchors: Tensor, anchor_valid: Tensor, positions: Tensor, block_size: int) -> list[Tile]:
    """Tiles that cover all valid blocks of a row; at least one block each, about TILE queries.

    Args:
        anchors: int64 [A], ascending where valid; the invalid ones come last.
        anchor_valid: bool [A].
        positions: int64 [S], from 0 in each document.
    """
    num_valid = int(anchor_valid.sum())
    per_tile = max(1, TILE // block_size)
    tiles = []
    for first in range(0, num_valid, per_tile):
        last = min(first + per_tile, num_valid) - 1
        begin, end = int(anchors[first]), int(anchors[last])
        tiles.append(
            Tile(
                queries=slice(first * block_size, (last + 1) * block_size),
                context=slice(begin - int(positions[begin]), end),
            )
        )
    return tiles


def tile_mask(rule: MaskMod, tile: Tile, num_context: int, device: torch.device) -> Tensor:
    """`rule` on a tile's queries and keys: bool [queries, context + queries]."""
    query = torch.arange(tile.queries.start, tile.queries.stop, device=device)
    context = torch.arange(tile.context.start, tile.context.stop, device=device)
    key = torch.cat([context, num_context + query])
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return rule(zero, zero, query[:, None], key[None])


def tiled_attend(tiles: Sequence[Tile], rules: Sequence[MaskMod], num_context: int) -> Attend:
    """Attention for layers with the given rules (layers of one kind share a rule object).

    Queries outside all tiles belong to invalid blocks and give zeros.
    """
    cpu = torch.device("cpu")
    masks = {id(rule): [tile_mask(rule, tile, num_context, cpu) for tile in tiles] for rule in rules}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = [
            attend_tile(q, k, v, tile, mask)
            for tile, mask in zip(tiles, masks[id(rules[layer])], strict=True)
        ]
        done = tiles[-1].queries.stop if tiles else 0
        return torch.cat([*pieces, torch.zeros_like(q[:, done:])], dim=1)

    return attend


def attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: Tensor) -> Tensor:
    """Attention of one tile's queries, [H, queries, hd].

    Args:
        q: [H, Q, hd].
        k, v: [KV, S + Q, hd].
        mask: its `tile_mask`.
    """
    num_context = k.shape[1] - q.shape[1]
    return scaled_dot_product_attention(
        q[None, :, tile.queries],
        _visible(k, tile, num_context)[None],
        _visible(v, tile, num_context)[None],
        attn_mask=mask,
        enable_gqa=True,
    )[0]


def _visible(x: Tensor, tile: Tile, num_context: int) -> Tensor:
    """Keys or values [KV, S + Q, hd] of a tile, [KV, context + queries, hd]."""
    own = x[:, num_context + tile.queries.start : num_context + tile.queries.stop]
    return torch.cat([x[:, tile.context], own], dim=1)
