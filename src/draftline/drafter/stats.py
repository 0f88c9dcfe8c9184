"""Additive sums of one row, kept in one vector so that rows, drafters and nodes combine by adding.

Layout (B - 1 = slots per block): [weighted CE, weight, blocks, run, CE per slot, count per slot, correct per
slot, prefix per slot].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.drafter.loss import SlotLoss

SCALARS = 4


def stats_size(block_size: int) -> int:
    """Length of the vector."""
    return SCALARS + 4 * (block_size - 1)


def row_stats(loss: SlotLoss, weights: Tensor, anchor_valid: Tensor) -> Tensor:
    """Sums over a row's blocks, float32 [stats_size].

    Args:
        weights: float32 [A, B]; a slot with weight 0 is not supervised.
        anchor_valid: bool [A].
    """
    slot_weights = weights[:, 1:]
    supervised = slot_weights > 0  # [A, B - 1]
    cross_entropy = torch.where(supervised, loss.cross_entropy, 0.0)
    correct = loss.correct & supervised
    prefix = correct.long().cumprod(dim=1)  # [A, B - 1]; 1 while every slot so far is right
    scalars = torch.stack(
        [
            (cross_entropy * slot_weights).sum(),
            slot_weights.sum(),
            anchor_valid.float().sum(),
            (prefix.sum(dim=1) + anchor_valid).float().sum(),
        ]
    )
    per_slot = [
        cross_entropy.sum(0),
        supervised.float().sum(0),
        correct.float().sum(0),
        prefix.float().sum(0),
    ]
    return torch.cat([scalars, *per_slot])


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did, over all rows and drafters."""

    loss: float
    """Nats: weighted mean of the objective."""
    weight: float
    """Sum of slot weights; 0 when no row of the step had an anchor."""
    num_blocks: int
    accept_anchor_mean: float
    """Tokens: 1 + leading run of right slots, averaged over anchors. Biased high against the measured
    acceptance length (ecosystem.md section 3)."""
    ce_pos: tuple[float, ...]
    """Nats per token at slots 1..B-1, unweighted."""
    top1_pos: tuple[float, ...]
    """Share right at each slot."""
    prefix_pos: tuple[float, ...]
    """Share of blocks in which every slot up to this one is right."""


def read_stats(vector: Tensor, block_size: int) -> StepStats:
    """Turn summed vectors into means; a step without anchors has loss 0."""
    weighted, weight, blocks, run, *rest = vector.tolist()
    slots = block_size - 1
    ce, count, correct, prefix = (rest[i * slots : (i + 1) * slots] for i in range(4))
    return StepStats(
        loss=weighted / weight if weight else 0.0,
        weight=weight,
        num_blocks=round(blocks),
        accept_anchor_mean=run / blocks if blocks else 0.0,
        ce_pos=tuple(c / n if n else 0.0 for c, n in zip(ce, count, strict=True)),
        top1_pos=tuple(c / n if n else 0.0 for c, n in zip(correct, count, strict=True)),
        prefix_pos=tuple(p / blocks if blocks else 0.0 for p in prefix),
    )
