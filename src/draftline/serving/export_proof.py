"""An exported folder against the weights it was made from, on the target that it will serve.

Strict loading proves names and shapes. This proves what they compute: the logits of blocks laid out as in training
with the weights that went in equal those that a decoder gets from the folder, and the acceptance length is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftline.config import TILE
from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from draftline.decoding.evaluate import Evaluation, Reference, evaluate
from draftline.decoding.greedy import CachedTarget
from draftline.drafter.model import Drafter
from draftline.errors import CheckpointError
from draftline.parity import NUM_BLOCKS, block_difference
from draftline.serving.importing import load_drafter
from draftline.target.load import Target

TOLERANCE = 1e-5
"""Largest difference of fp32 logits, relative to the largest logit."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and how far it is apart."""

    blocks: int
    logits: float
    """Largest difference of fp32 logits, relative to the largest logit."""
    tau: float | None
    """Acceptance length of the folder, equal to that of the weights; None when it was not measured."""


def prove_on_target(
    target: Target,
    original: Drafter,
    folder: Path,
    references: Sequence[Reference],
    measured: Evaluation | None,
    progress: Callable[[int], None] = lambda _done: None,
) -> Proof:
    """Load a folder and compare it with the drafter that it was written from.

    Args:
        original: the drafter that was written, bf16 weights in any dtype.
        references: answers of the target; the longest one is the text whose blocks are compared.
        measured: evaluation of `original` on `references`; None leaves acceptance out.
        progress: told after each answer how many the folder has been replayed on.

    Raises:
        CheckpointError: logits or acceptance differ.
    """
    _, reloaded = load_drafter(folder, original.spec.num_target_layers)
    longest = max(references, key=lambda reference: len(reference.answer))
    text = [*longest.prompt.input_ids, *longest.answer]
    blocks, logits = _compare_logits(target, original, reloaded, text)
    if not logits <= TOLERANCE:
        raise CheckpointError(
            f"{folder} drafts something else than the weights it was made from: logits of {blocks} blocks differ by "
            f"{logits:.3g} of the largest (at most {TOLERANCE}); check the disk and export again"
        )
    if measured is None:
        return Proof(blocks, logits, None)
    served = reloaded.to(device=target.device, dtype=target.embedding.dtype)
    again = evaluate(target, served, references, progress=progress)
    if again.overall != measured.overall:
        raise CheckpointError(
            f"{folder} is accepted otherwise than the weights it was made from: tau {again.overall.tau:.4f} against "
            f"{measured.overall.tau:.4f} on the same answers; check the disk and export again"
        )
    return Proof(blocks, logits, again.overall.tau)


def _compare_logits(
    target: Target, original: Drafter, reloaded: Drafter, text: Sequence[int]
) -> tuple[int, float]:
    """Blocks compared and the largest relative difference of their logits."""
    spec = original.spec
    row = _row(text, spec.block_size)
    with torch.inference_mode():
        sequence = CachedTarget(target, spec.target_layer_ids)
        fed = sequence.feed(torch.tensor(list(text), device=target.device), num_logits=1).taps
    taps = fed.new_zeros(len(row.input_ids), fed.shape[1])
    taps[: len(fed)] = fed
    count = min(NUM_BLOCKS, int(row.anchor_valid.sum()))
    training, serving = _wide(original, target), _wide(reloaded, target)
    return count, block_difference(target, training, serving, row, taps, count)


def _wide(drafter: Drafter, target: Target) -> Drafter:
    """A copy in fp32 on the target's device."""
    wide = Drafter(drafter.spec)
    wide.load_state_dict(drafter.state_dict(), strict=True)
    return wide.to(target.device).eval()


def _row(text: Sequence[int], block_size: int) -> Row:
    """A row that holds one text, with anchors anywhere in it."""
    budget = -(-len(text) // TILE) * TILE
    document = Document(np.array(text, dtype=np.int32), np.ones(len(text), dtype=bool))
    shape = RowShape(budget, TILE, block_size, NUM_BLOCKS, 1.0, ())
    return row_from_documents(0, [document], shape, seed=0)
