"""The drafter's attention by FlashAttention 4: the same tables of tiles as flex, forward and backward.

Inside a tile that is not full the kernels ask `sees`, the rule of `mask.mask_mod` over two bounds: a query's context
is one interval of keys. The gradients of queries are summed over tiles in the order in which these finish, so
that two runs differ in their last bits; everything else is repeatable.

Legend: A = blocks, B = block size, Q = A * B queries, S = context keys, H = query heads, KV = key/value heads,
hd = head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftline.config import TILE
from draftline.drafter.attention import Attend
from draftline.flash import kernels

if TYPE_CHECKING:
    from draftline.data.tables import BlockTables

NOTHING = -1
"""Upper bound of a block that sees nothing, not even itself."""


@dataclass(frozen=True)
class Bounds:
    """The context keys [lower, upper) that each query of a layer sees, on the drafter's device."""

    lower: Tensor  # int32 [Q]
    upper: Tensor  # int32 [A], shared by a block's queries; NOTHING for a block that is not valid
    causal: bool
    """Whether slots see only slots up to their own."""


def context_bounds(
    anchors: Tensor,
    anchor_valid: Tensor,
    positions: Tensor,
    *,
    block_size: int,
    window: int | None,
    causal: bool,
) -> Bounds:
    """The visibility rule as bounds: from the anchor's document's start, or the window's, to before the anchor.

    Args: as of `mask.mask_mod`.
    """
    slots = torch.arange(block_size, device=anchors.device)
    start = anchors - positions[anchors]  # [A]
    lower = start[:, None].expand(-1, block_size)  # [A, B]
    if window is not None:
        lower = torch.maximum(lower, anchors[:, None] + slots + 1 - window)
    upper = torch.where(anchor_valid, anchors, NOTHING)
    return Bounds(lower.flatten().to(torch.int32), upper.to(torch.int32), causal)


def flash_attend(tables: Sequence[BlockTables], bounds: Sequence[Bounds]) -> Attend:
    """Block-sparse attention with one table and one rule per layer; layers of one kind may share both."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rule, table = bounds[layer], tables[layer]
        tokens_first = (x.transpose(0, 1) for x in (q, k, v))
        out, _ = flash_blocks(*tokens_first, rule.lower, rule.upper, _listed(table), rule.causal)
        return out.transpose(0, 1)

    return attend


def _listed(table: BlockTables) -> list[Tensor]:
    return [
        table.kv_num_blocks,
        table.kv_indices,
        table.full_kv_num_blocks,
        table.full_kv_indices,
        table.q_num_blocks,
        table.q_indices,
        table.full_q_num_blocks,
        table.full_q_indices,
    ]


@torch.library.custom_op("draftline::flash_blocks", mutates_args=())
def flash_blocks(
    q: Tensor, k: Tensor, v: Tensor, lower: Tensor, upper: Tensor, tables: Sequence[Tensor], causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of block tokens to the context and to their own block.

    Args:
        q: [Q, H, hd].
        k, v: [S + Q, KV, hd].
        lower, upper, causal: see `Bounds`.
        tables: the eight tensors of `BlockTables`, in its order.

    Returns:
        Output [Q, H, hd], and the logarithms of the softmax sums, float32 [H, Q].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    kernels()._flash_attn_fwd(
        q[None],
        k[None],
        v[None],
        mask_mod=_rule(q, k, upper, causal=causal),
        block_sparse_tensors=_tiles(tables[:4]),
        aux_tensors=[lower, upper],
        return_lse=True,
        out=out[None],
        lse=sums[None],
    )
    return out, sums


@torch.library.custom_op("draftline::flash_blocks_backward", mutates_args=())
def flash_blocks_backward(
    slope: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    lower: Tensor,
    upper: Tensor,
    tables: Sequence[Tensor],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, shaped like them, from `slope` [Q, H, hd], the gradient of the output."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    kernels()._flash_attn_bwd(
        q[None],
        k[None],
        v[None],
        out[None],
        slope[None],
        sums[None],
        mask_mod=_rule(q, k, upper, causal=causal),
        block_sparse_tensors=_tiles(tables[4:]),
        aux_tensors=[lower, upper],
        **{name: x[None] for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)},
    )
    return gradients[0], gradients[1], gradients[2]


@flash_blocks.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    lower: Tensor,  # noqa: ARG001
    upper: Tensor,  # noqa: ARG001
    tables: Sequence[Tensor],  # noqa: ARG001
    causal: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@flash_blocks_backward.register_fake
def _(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lower, upper, tables, ctx.causal = inputs
    ctx.set_materialize_grads(False)  # the sums have no gradient
    ctx.save_for_backward(q, k, v, *output, lower, upper, *tables)


def _backward(ctx: Any, slope: Tensor, _sums: None) -> tuple[Tensor | list[None] | None, ...]:
    q, k, v, out, sums, lower, upper, *tables = ctx.saved_tensors
    gradients = flash_blocks_backward(slope, q, k, v, out, sums, lower, upper, tables, ctx.causal)
    return *gradients, None, None, [None] * len(tables), None


flash_blocks.register_autograd(_backward, setup_context=_remember)


def _tiles(tables: Sequence[Tensor]) -> Any:
    package = import_module("flash_attn.cute.block_sparsity")
    return package.BlockSparseTensorsTorch(*tables, block_size=(TILE, TILE))


def _rule(q: Tensor, k: Tensor, upper: Tensor, *, causal: bool) -> Callable[..., Any]:
    return make_rule(k.shape[0] - q.shape[0], q.shape[0] // upper.shape[0], causal)


def sees(q: Any, k: Any, lower: Any, upper: Any, num_context: int, block_size: int, causal: bool) -> Any:
    """Whether query q sees key k, of tensors or of a kernel's numbers.

    Args:
        lower: of the query.
        upper: of its block.
    """
    context = (k >= lower) & (k < upper)
    own = (k >= num_context) & ((k - num_context) // block_size == q // block_size) & (upper >= 0)
    if causal:
        own = own & ((k - num_context) % block_size <= q % block_size)
    return context | own


@lru_cache
def make_rule(num_context: int, block_size: int, causal: bool) -> Callable[..., Any]:
    """`sees` as the package's kernels take a rule: over indices of one query and one key."""
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    utils = import_module("flash_attn.cute.utils")

    @cute.jit
    def block_sees(batch: Any, head: Any, query: Any, key: Any, lengths: Any, bounds: Any) -> Any:  # noqa: ARG001
        q, k, lower, upper = query[0], key[0], bounds[0], bounds[1]
        seen = sees(q, k, lower[q], upper[q // block_size], num_context, block_size, causal)
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    return block_sees
