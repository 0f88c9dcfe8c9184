"""Which key a block token may see: one predicate, used dense (CPU), block-sparse (flex) and when decoding.

Queries are the A*B block tokens; query q is slot q % B of block q // B. Keys are the S context tokens, then
the same A*B block tokens. The rule is the one that SGLang, vLLM and z-lab's dflash 0.1.0 serve by:

- context: strictly before the anchor, because the anchor is the token that the target has just produced and
  its hidden state does not exist yet when the block is drafted; and in the anchor's own document;
- block: the query's own block, in both directions or, in a causal layer, up to the query's own slot;
- window W of a sliding layer: context at most W - 1 positions behind the query (the query, not the anchor).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) index tensors -> bool, the form that flex_attention takes."""


def mask_mod(
    anchors: Tensor,
    anchor_valid: Tensor,
    document_ids: Tensor,
    positions: Tensor,
    *,
    block_size: int,
    window: int | None,
    causal: bool,
) -> MaskMod:
    """The visibility rule as a function of indices.

    Args:
        anchors: int64 [A], context offset of each block's anchor.
        anchor_valid: bool [A]; the tokens of a block that is not valid see nothing.
        document_ids: int32 [S], document of each context token, -1 for padding.
        positions: int64 [S], restarting at 0 at each document.
        block_size: B.
        window: W in tokens, the query itself included; None for full attention. At least B.
        causal: whether slots see only slots up to their own.
    """
    context_len = document_ids.shape[0]

    def block_sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block, slot = query // block_size, query % block_size
        anchor = anchors[block]
        in_context = key < context_len
        # A load past the end is an illegal access in a compiled kernel, even when the result is not used.
        context_key = torch.where(in_context, key, 0)
        context = in_context & (key < anchor) & (document_ids[context_key] == document_ids[anchor])
        if window is not None:
            context = context & (positions[context_key] > positions[anchor] + slot - window)
        own = (key >= context_len) & ((key - context_len) // block_size == block)
        if causal:
            own = own & ((key - context_len) % block_size <= slot)
        return anchor_valid[block] & (context | own)

    block_sees.__name__ = f"block_sees_{window or 'all'}_{'causal' if causal else 'both_ways'}"
    return block_sees


def block_mask_dense(
    anchors: Tensor,
    anchor_valid: Tensor,
    document_ids: Tensor,
    positions: Tensor,
    *,
    block_size: int,
    window: int | None,
    causal: bool,
) -> Tensor:
    """`mask_mod` for every pair at once: bool [A*B, S + A*B], True where the query sees the key."""
    sees = mask_mod(
        anchors, anchor_valid, document_ids, positions, block_size=block_size, window=window, causal=causal
    )
    num_queries = anchors.shape[0] * block_size
    query = torch.arange(num_queries, device=anchors.device)[:, None]
    key = torch.arange(document_ids.shape[0] + num_queries, device=anchors.device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=anchors.device)
    return sees(zero, zero, query, key)


def decoding_mask(
    context_len: int, *, block_size: int, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """The rule for one block after `context_len` cached tokens: bool [B, S + B], None when all is seen."""
    if window is None and not causal:
        return None
    # The anchor is the token right after the context: the rule reads its row, and never shows its key.
    positions = torch.arange(context_len + 1, device=device)
    anchors = positions[-1:]
    mask = block_mask_dense(
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
        torch.zeros_like(positions),
        positions,
        block_size=block_size,
        window=window,
        causal=causal,
    )
    return torch.cat([mask[:, :context_len], mask[:, context_len + 1 :]], dim=1)
