"""FlashAttention 4 is compared with dense float32 attention before a run may use it.

Its kernels differ by head size and change from version to version, and a wrong gradient shows in no count of kernels:
heads of 80 gave gradients of queries that had nothing to do with the right ones (flash-attn-4 4.0.0b36, H200).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.data.tables import BlockTables
from draftline.data.transfer import DeviceRow
from draftline.drafter.flash import Bounds, flash_attend
from draftline.drafter.mask import MaskMod
from draftline.drafter.tiled import Tile, attend_tile, query_tiles, tile_mask
from draftline.errors import AttentionFallbackError
from draftline.flash import OR_FLEX, installed_version

TOLERANCE = 2e-2
"""Relative distance of bfloat16 results from float32 ones that is rounding; 0.0024 where they are right."""
NUM_TILES = 8
"""Tiles of queries whose results are compared, evenly spread over the row."""


def prove_flash(
    spec: DrafterSpec, row: DeviceRow, kinds: Sequence[tuple[Bounds, MaskMod]], dtype: torch.dtype
) -> float | None:
    """Compare outputs and gradients on a run's own row, for every kind of layer.

    Args:
        kinds: bounds and rule of each kind of layer, in the order of the row's tables.
        dtype: what the run computes in.

    Returns:
        The largest relative distance; None for a row without a block, which compares nothing.

    Raises:
        AttentionFallbackError: it is more than rounding.
    """
    tiles = _spread(query_tiles(row.anchors, row.anchor_valid, row.positions, spec.block_size))
    if not tiles:
        return None
    worst = 0.0
    *inputs, slopes = _random(spec, row, dtype)
    slope = _of(tiles, slopes)
    for tables, (bounds, rule) in zip(row.tables, kinds, strict=True):
        ours = _results(partial(_flash, tiles, tables, bounds), inputs, slope)
        masks = [tile_mask(rule, tile, len(row.positions), slope.device) for tile in tiles]
        truth = _results(partial(_dense, tiles, masks), [x.float() for x in inputs], slope.float())
        for name, found, right in zip(("outputs", "dq", "dk", "dv"), ours, truth, strict=True):
            distance = float((found.float() - right).norm() / right.norm())
            worst = max(worst, distance)
            if not distance <= TOLERANCE:
                raise AttentionFallbackError(
                    f"flash-attn-4 {installed_version()} is wrong for heads of {spec.head_dim} on {slope.device}: "
                    f"its {name} are {distance:.2g} from dense float32 attention (at most {TOLERANCE}); use another "
                    f"version, {OR_FLEX}"
                )
    return worst


def _spread(tiles: list[Tile]) -> list[Tile]:
    step = max(1, len(tiles) // NUM_TILES)
    return tiles[step - 1 :: step]  # the later a tile, the more it sees


def _random(spec: DrafterSpec, row: DeviceRow, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of one key/value head and its query heads, more would be the same again, and an output's gradient."""
    device, group = row.positions.device, spec.num_heads // spec.num_kv_heads
    num_queries = len(row.anchors) * spec.block_size
    num_keys = len(row.positions) + num_queries
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(heads, tokens, spec.head_dim, generator=generator, device=device).to(dtype)
        for heads, tokens in ((group, num_queries), (1, num_keys), (1, num_keys), (group, num_queries))
    ]


def _flash(tiles: Sequence[Tile], tables: BlockTables, bounds: Bounds, *qkv: Tensor) -> Tensor:
    return _of(tiles, flash_attend([tables], [bounds])(0, *qkv))


def _dense(tiles: Sequence[Tile], masks: Sequence[Tensor], *qkv: Tensor) -> Tensor:
    q, k, v = qkv
    each = zip(tiles, masks, strict=True)
    return torch.cat([attend_tile(q, k, v, tile, mask) for tile, mask in each], dim=1)


def _of(tiles: Sequence[Tile], x: Tensor) -> Tensor:
    """The queries of `tiles`, of x [H, Q, hd]."""
    return torch.cat([x[:, tile.queries] for tile in tiles], dim=1)


def _results(attend: Callable[..., Tensor], inputs: list[Tensor], slope: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]
