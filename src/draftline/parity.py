"""Step 0 of every run: on the user's own target and data, a training block is the block that decoding drafts.

The trainer lays out many blocks at once over a packed row; the decoder lays out one at a time after a cached
context. Both are run here on blocks of the run's first row with the target's own embedding, head and taps, and
must agree; and the taps that the trainer reads must be those that the decoder's cached target gives. A disagreement
means a drafter that learns well and is served badly, which no loss would show.

The drafter is a small one of the same kind: what is compared is layout, positions, visibility and labels, not
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.data.rows import Row
from draftline.decoding.greedy import CachedTarget
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import block_positions, block_token_ids, lay_out_blocks
from draftline.drafter.draft import BlockDrafter
from draftline.drafter.mask import block_mask_dense
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.pipeline.job import Job, forward_of
from draftline.target.forward import share_weights
from draftline.target.load import Target
from draftline.target.rounding import distance, rounding_limit

TOLERANCE = 1e-5
"""Largest difference of fp32 logits, relative to the largest logit."""
NUM_BLOCKS = 16
NUM_DOCUMENTS = 3
"""Documents whose taps are compared: the first has nothing before it, the others have."""
SMALL_MLP = 64
HEAD_ROWS = 4096
"""Rows of the head that logits are taken for, evenly spread; all of a large one in fp32 would be gigabytes."""


@dataclass(frozen=True)
class Parity:
    """How far training and decoding are apart."""

    blocks: int
    """Blocks compared."""
    logits: float
    """Largest difference of fp32 logits from the same taps, relative to the largest logit."""
    taps: float
    """Distance between the trainer's taps of a document and the decoder's, as in the target's self-test."""

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"step 0      training = decoding: {self.blocks} blocks, labels and positions equal, logits within "
            f"{self.logits:.1e} (at most {TOLERANCE:.0e}), taps within {self.taps:.1e}"
        )


def prove_start(job: Job) -> Parity:
    """Compare training and decoding on the first row of a run, with the run's own target and spec.

    Raises:
        ConfigError: they disagree; see `prove_parity`, `prove_taps` and `prove_token_rows`.
    """
    row, forward = job.source.row(0), forward_of(job, job.target.model)
    forward.load(row)
    taps = forward.run()
    prove_token_rows(job.target, job.spec, row, forward.states.token_rows)
    return Parity(
        blocks=min(NUM_BLOCKS, int(row.anchor_valid.sum())),
        logits=prove_parity(job.target, job.spec, row, taps),
        taps=prove_taps(job.target, job.spec.target_layer_ids, row, taps),
    )


def prove_token_rows(target: Target, spec: DrafterSpec, row: Row, token_rows: Tensor) -> None:
    """Compare the embedding rows that training reads of a row's blocks with those that decoding looks up.

    Args:
        token_rows: [A + 1, D] of the row, from the trainer's forward of the target.

    Raises:
        ConfigError: they are not the same to the last bit.
    """
    ids = block_token_ids(row.input_ids, row.anchors, row.anchor_valid, spec.mask_token_id, spec.block_size)
    trained = lay_out_blocks(token_rows, spec.block_size)  # [A, B, D]
    if not torch.equal(trained, F.embedding(ids.to(target.device), target.embedding)):
        raise ConfigError(
            f"the embedding rows that training reads of {target.name} are not those of its blocks' tokens. This is a "
            "defect for this kind of target: please report it with the target's config.json"
        )


def prove_taps(target: Target, target_layer_ids: tuple[int, ...], row: Row, taps: Tensor) -> float:
    """Compare the trainer's taps of a row's first documents with the decoder's, which feeds each to a cache.

    Args:
        taps: [T, K*D] of the row, from the trainer's forward of the target.

    Returns:
        The largest distance.

    Raises:
        ConfigError: it is more than rounding.
    """
    apart = replace(target, model=share_weights(target.model))  # its hooks must not meet anyone's
    distances = []
    bounds = list(pairwise(row.starts))[:NUM_DOCUMENTS]
    for start, stop in bounds:
        with torch.inference_mode():
            document = row.input_ids[start:stop].to(target.device)
            decoded = CachedTarget(apart, target_layer_ids).feed(document, num_logits=1).taps
            distances.append(distance(taps[start:stop], decoded, len(target_layer_ids)))
    found = float(torch.stack(distances).max())  # a NaN is the largest here, and lost in Python's max
    documents = [row.input_ids[slice(*each)] for each in bounds]
    allowed = rounding_limit(target.model, target_layer_ids, documents, found)
    if not found <= allowed:
        raise ConfigError(
            f"the taps that training reads of {target.name} are not those that decoding gives: they are {found:.2g} "
            f"apart (at most {allowed:.2g}). This is a defect for this kind of target: please report it with the "
            "target's config.json"
        )
    return found


def prove_parity(target: Target, spec: DrafterSpec, row: Row, taps: Tensor) -> float:
    """Compare training and decoding on the first blocks of a row.

    Args:
        taps: [T, K*D] of the row, from the trainer's forward of the target.

    Returns:
        The largest relative difference of logits, 0 for a row without a block.

    Raises:
        ConfigError: they disagree, or a label is not the token that the decoder would compare a draft with.
    """
    count = min(NUM_BLOCKS, int(row.anchor_valid.sum()))
    if count == 0:
        return 0.0
    _check_labels(row, count)
    drafter = _small_drafter(spec, target.device)
    difference = block_difference(target, drafter, drafter, row, taps, count)
    if not difference <= TOLERANCE:
        raise ConfigError(
            f"training and decoding disagree on {target.name}: logits of the same blocks differ by "
            f"{difference:.2g} (at most {TOLERANCE}); a drafter trained so would be served badly. This is a "
            "defect for this kind of target: please report it with the target's config.json"
        )
    return difference


@torch.inference_mode()
def block_difference(
    target: Target, training: Drafter, serving: Drafter, row: Row, taps: Tensor, count: int
) -> float:
    """Largest difference of fp32 logits between one drafter in training and one in decoding, over the first `count`
    blocks of a row, relative to the largest logit.

    Args:
        training, serving: fp32, on the target's device.
        taps: [T, K*D] of the row.
    """
    embedding = target.embedding  # rows are widened when they are looked up
    head = target.head[:: -(-len(target.head) // HEAD_ROWS)].float()
    trained = _trained(training, embedding, head, row, taps.float(), count)
    decoded = _decoded(serving, embedding, head, row, taps.float(), count)
    return ((trained - decoded).abs().max() / decoded.abs().max()).item()


def _small_drafter(spec: DrafterSpec, device: torch.device) -> Drafter:
    small = spec.model_copy(update={"intermediate_size": min(spec.intermediate_size, SMALL_MLP)})
    drafter = Drafter(small)
    drafter.init_weights(seed=0)
    return drafter.to(device).eval()


def _trained(drafter: Drafter, embedding: Tensor, head: Tensor, row: Row, taps: Tensor, count: int) -> Tensor:
    """Logits [count, B-1, V] the way a training step lays blocks out."""
    spec, device = drafter.spec, taps.device
    tokens, places, documents = (x.to(device) for x in (row.input_ids, row.positions, row.document_ids))
    anchors, valid = row.anchors[:count].to(device), row.anchor_valid[:count].to(device)
    ids = block_token_ids(tokens, anchors, valid, spec.mask_token_id, spec.block_size)
    masks = [
        block_mask_dense(
            anchors,
            valid,
            documents,
            places,
            block_size=spec.block_size,
            window=spec.window_of(layer),
            causal=spec.causal_in_block(layer),
        )
        for layer in range(spec.num_layers)
    ]
    hidden = drafter(
        F.embedding(ids.flatten(), embedding).float() * spec.input_embedding_scale,
        taps,
        places,
        block_positions(places, anchors, spec.block_size).flatten(),
        sdpa_attend(masks),
    )
    return F.linear(hidden.unflatten(0, ids.shape)[:, 1:], head)


def _decoded(drafter: Drafter, embedding: Tensor, head: Tensor, row: Row, taps: Tensor, count: int) -> Tensor:
    """The same logits the way a decoder drafts: document by document, after what it has observed."""
    logits = []
    for anchor in row.anchors[:count].tolist():
        start = anchor - int(row.positions[anchor])
        block = BlockDrafter(drafter, embedding, head, capacity=anchor - start)
        block.observe(taps[start:anchor])
        logits.append(block.logits(int(row.input_ids[anchor])))
    return torch.stack(logits)


def _check_labels(row: Row, count: int) -> None:
    """A draft of slot k is compared with the token k places after the anchor, in the anchor's document."""
    for block, anchor in enumerate(row.anchors[:count].tolist()):
        end = next(bound for bound in row.starts if bound > anchor)
        for slot in range(1, row.labels.shape[1]):
            weighs = row.weights[block, slot] > 0
            right = anchor + slot < end and row.labels[block, slot] == row.input_ids[anchor + slot]
            if weighs and not right:
                raise ConfigError(
                    f"block {block} of row {row.index} would learn token {int(row.labels[block, slot])} at slot "
                    f"{slot}, which is not the token that follows its anchor there; please report this"
                )
