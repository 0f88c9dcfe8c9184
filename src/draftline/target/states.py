"""What a target gives a drafter for one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTokens:
    """What the blocks of every row are made of, beside its own tokens."""

    num_blocks: int
    mask_token_id: int


@dataclass(frozen=True)
class TargetStates:
    """Taps and embedding rows at fixed addresses, in one buffer, so that one copy carries both.

    With them a drafter needs the target's head and nothing else of it: its blocks hold anchor tokens and the mask
    token, so a few hundred rows of the embedding are all that it reads.

    Legend: T = tokens of a row, K = taps, D = hidden size, A = blocks, N = A + 1, or 0 where only taps are wanted.
    """

    buffer: Tensor  # [(T * K + N) * D]
    taps: Tensor  # [T, K * D]
    token_rows: Tensor  # [N, D]; raw embedding rows of `blocks.opening_tokens`

    @classmethod
    def zeros(
        cls, tokens: int, num_taps: int, num_blocks: int | None, hidden_size: int, like: Tensor
    ) -> TargetStates:
        """Room for one row, with the type and on the device of `like`; only for taps if `num_blocks` is None."""
        size = num_states(tokens, num_taps, num_blocks) * hidden_size
        buffer = torch.zeros(size, dtype=like.dtype, device=like.device)
        taps, rows = buffer.view(-1, hidden_size).tensor_split([tokens * num_taps])
        return cls(buffer, taps.view(tokens, num_taps * hidden_size), rows)


def num_states(tokens: int, num_taps: int, num_blocks: int | None) -> int:
    """Vectors [D] in the `TargetStates` of one row."""
    return tokens * num_taps + (0 if num_blocks is None else num_blocks + 1)
