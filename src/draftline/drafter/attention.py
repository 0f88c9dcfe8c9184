"""The drafter's attention: backends behind one signature, chosen once at start and never swapped.

`sdpa` is dense with a boolean mask and works everywhere; `flex` is block-sparse and needs CUDA to train
(PyTorch has no flex backward on a CPU); `flash`, in flash.py, is block-sparse by FlashAttention 4.

Legend: H = query heads, KV = key/value heads, Q = queries, S = context keys, hd = head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from draftline.config import TILE
from draftline.drafter.mask import MaskMod

if TYPE_CHECKING:
    from draftline.data.tables import BlockTables

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [H, Q, hd], k [KV, S+Q, hd], v [KV, S+Q, hd]) -> [H, Q, hd]."""
HOPPER = 9
"""Major compute capability of H100 and H200."""
HOPPER_TILES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
    64: (
        {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 3, "num_warps": 4, "USE_TMA": True},
        {
            "BLOCK_M1": 64,
            "BLOCK_N1": 64,
            "BLOCK_M2": 64,
            "BLOCK_N2": 64,
            "num_stages": 3,
            "num_warps": 4,
            "USE_TMA": True,
        },
    ),
    128: (
        {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
        {
            "BLOCK_M1": 64,
            "BLOCK_N1": 128,
            "BLOCK_M2": 128,
            "BLOCK_N2": 64,
            "num_stages": 3,
            "num_warps": 8,
            "USE_TMA": True,
        },
    ),
}
"""Head size: (forward, backward). Q and K tiles divide the 128 tokens of a table's tile; TMA is the memory accelerator
that loads them."""


def sdpa_attend(masks: Sequence[Tensor | None]) -> Attend:
    """Dense attention with one boolean mask [Q, S+Q] per layer; None means that every key is seen.

    A query that sees nothing gives zeros, and takes part in no gradient. Layers may share a mask tensor.
    """
    prepared = {id(mask): _without_dead_rows(mask) for mask in masks if mask is not None}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masks[layer]
        if mask is None:
            return _attention(q, k, v, None)
        open_mask, dead = prepared[id(mask)]
        return _attention(q, k, v, open_mask).masked_fill(dead, 0)

    return attend


def _without_dead_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    # Softmax over no key is 0/0 in some kernels, and the NaN would reach every gradient through the key sums.
    # So a dead row attends to everything and its output is then replaced, which also cuts its gradient.
    dead = ~mask.any(dim=-1, keepdim=True)  # [Q, 1]
    return mask | dead, dead


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]


def block_mask_from_tables(
    tables: BlockTables, mask_mod: MaskMod, num_queries: int, num_keys: int
) -> BlockMask:
    """A BlockMask over tables that already exist, so that building it reads no tensor and starts no kernel.

    The tables are used by address: a captured step sees whatever they hold when it is replayed.
    """
    return BlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=tables.kv_num_blocks,
        kv_indices=tables.kv_indices,
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices,
        q_num_blocks=tables.q_num_blocks,
        q_indices=tables.q_indices,
        full_q_num_blocks=tables.full_q_num_blocks,
        full_q_indices=tables.full_q_indices,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def kernel_options(head_dim: int, capability: tuple[int, int] | None) -> dict[str, Any]:
    """Tiles of the block-sparse kernels where others than Inductor's own were measured to be faster (docs/speed.md).

    Args:
        capability: of the device; None on a CPU.
    """
    if capability is None or capability[0] != HOPPER:
        return {}
    forward, backward = HOPPER_TILES.get(head_dim, ({}, {}))
    return {
        **{f"fwd_{name}": value for name, value in forward.items()},
        **{f"bwd_{name}": value for name, value in backward.items()},
    }


def flex_attend(
    tables: Sequence[BlockTables],
    mask_mods: Sequence[MaskMod],
    flex: Callable[..., Tensor] = flex_attention,
    options: Mapping[str, Any] | None = None,
) -> Attend:
    """Block-sparse attention with one table and one mask_mod per layer.

    Args:
        tables: of each layer, on the drafter's device; layers with one window may share them.
        mask_mods: of each layer, from `mask.mask_mod` over tensors on the drafter's device.
        flex: flex_attention, or the caller's compiled form of it. Eager flex on CUDA is the dense
            implementation; a caller that trains passes the compiled one.
        options: of the kernels, see `kernel_options`.
    """
    settings = dict(options or {})

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block_mask = block_mask_from_tables(tables[layer], mask_mods[layer], q.shape[1], k.shape[1])
        return flex(
            q[None], k[None], v[None], block_mask=block_mask, enable_gqa=True, kernel_options=settings
        )[0]

    return attend
