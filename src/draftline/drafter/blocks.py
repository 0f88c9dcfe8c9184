"""What a block looks like: token ids and positions. Trainer and decoder both call these.

Legend: T = tokens of context, A = blocks, B = block size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def opening_tokens(input_ids: Tensor, anchors: Tensor, anchor_valid: Tensor, mask_token_id: int) -> Tensor:
    """The tokens that all blocks are made of: the first of each block, then the mask token once.

    Args:
        input_ids: int64 [T], the row (or the text so far, when decoding).
        anchors: int64 [A], offsets into `input_ids`.
        anchor_valid: bool [A]; a block that is not valid begins with the mask token too.

    Returns:
        int64 [A + 1].
    """
    first = torch.where(anchor_valid, input_ids[anchors], mask_token_id)
    return torch.cat([first, first.new_full((1,), mask_token_id)])


def lay_out_blocks(openings: Tensor, block_size: int) -> Tensor:
    """What belongs to the `opening_tokens`, [A + 1, ...], at every slot of the blocks, [A, B, ...]."""
    first, mask = openings[:-1, None], openings[-1:, None]
    slots = torch.arange(block_size, device=openings.device)
    # Not a concatenation, which the compiler cannot compute again and would keep for the backward pass.
    return torch.where((slots == 0).view(-1, *[1] * (openings.dim() - 1)), first, mask)


def block_token_ids(
    input_ids: Tensor, anchors: Tensor, anchor_valid: Tensor, mask_token_id: int, block_size: int
) -> Tensor:
    """Token ids of every block: the anchor token, then `block_size - 1` mask tokens.

    Args:
        input_ids: int64 [T], the row (or the text so far, when decoding).
        anchors: int64 [A], offsets into `input_ids`.
        anchor_valid: bool [A]; a block that is not valid holds mask tokens only.

    Returns:
        int64 [A, B].
    """
    return lay_out_blocks(opening_tokens(input_ids, anchors, anchor_valid, mask_token_id), block_size)


def block_positions(positions: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Rotary positions of every block: the anchor's own position, counted on.

    Args:
        positions: int64 [T], restarting at 0 at each document.
        anchors: int64 [A], offsets into `positions`.

    Returns:
        int64 [A, B].
    """
    return positions[anchors][:, None] + torch.arange(block_size, device=positions.device)
