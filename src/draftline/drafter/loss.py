"""Weighted cross-entropy against the target's frozen head, with its gradient taken in the forward pass.

The head takes no gradient, so the gradient of the hidden states is all that backward needs. It is computed
chunk by chunk together with the logits, which therefore never exist for more than `chunk_rows` slots at once
and are never computed twice.

Legend: A = blocks, B = block size, R = A * (B - 1) slots that can carry weight, D = hidden, V = head rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Chunk = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def cross_entropy_chunk(
    hidden: Tensor,  # [R, D]
    head: Tensor,  # [V, D]
    labels: Tensor,  # int64 [R]
    weights: Tensor,  # float32 [R]
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each slot in fp32, whether the best token is the label, and d(sum w*CE)/d hidden.

    Returns:
        cross_entropy float32 [R], correct bool [R], gradient [R, D] in hidden's dtype.
    """
    logits = F.linear(hidden, head).float()  # [R, V]
    # In this form Inductor reads the logits twice: for maximum and sum at once, and for what follows from them.
    maximum = logits.amax(dim=-1, keepdim=True)
    exponentials = (logits - maximum).exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    true_logit = logits.gather(-1, labels[:, None])  # [R, 1]
    column, label = (
        torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)[None],
        labels.int()[:, None],
    )
    # of equals the first is the best, as argmax has it; an argmax of its own costs more than the whole slope
    is_better = (logits > true_logit) | ((logits == true_logit) & (column < label))
    weight = weights[:, None]
    slope = exponentials * (weight / total) - (column == label).float() * weight
    cross_entropy = (maximum + total.log() - true_logit)[:, 0]
    return cross_entropy, ~is_better.any(dim=-1), slope.to(hidden.dtype) @ head


@dataclass(frozen=True)
class SlotLoss:
    """What the loss knows of each slot that can carry weight."""

    cross_entropy: Tensor  # float32 [A, B - 1]
    correct: Tensor  # bool [A, B - 1]
    gradient: Tensor  # [A * B, D]; of sum w*CE, not yet divided by the step's total weight


def frozen_head_loss(
    hidden: Tensor,  # [A * B, D]
    head: Tensor,  # [V, D]
    labels: Tensor,  # int64 [A, B]
    weights: Tensor,  # float32 [A, B]; slot 0 weighs nothing
    chunk_rows: int,
    chunk: Chunk = cross_entropy_chunk,
) -> SlotLoss:
    """Loss terms and the gradient of the drafter's output (paper section 4.2; dflash.md 2.4).

    Slot 0 is the anchor itself and is left out of every product. The gradient is of the *sum*: the whole
    optimizer step is divided by its total weight once, so the result does not depend on how rows are spread.

    Args:
        chunk_rows: slots whose logits exist at one time.
        chunk: `cross_entropy_chunk` or a compiled form of it.
    """
    num_blocks, block_size = labels.shape
    with torch.no_grad():
        rows = hidden.detach().unflatten(0, (num_blocks, block_size))[:, 1:].flatten(0, 1)  # [R, D]
        flat_labels, flat_weights = labels[:, 1:].flatten(), weights[:, 1:].flatten()
        parts = [
            chunk(h, head, y, w)
            for h, y, w in zip(
                rows.split(chunk_rows),
                flat_labels.split(chunk_rows),
                flat_weights.split(chunk_rows),
                strict=True,
            )
        ]
        cross_entropy, correct, slopes = (torch.cat(column) for column in zip(*parts, strict=True))
        gradient = F.pad(slopes.unflatten(0, (num_blocks, block_size - 1)), (0, 0, 1, 0))
    return SlotLoss(
        cross_entropy=cross_entropy.view(num_blocks, block_size - 1),
        correct=correct.view(num_blocks, block_size - 1),
        gradient=gradient.flatten(0, 1),
    )
