"""A block in a packed training row is the block that decoding drafts, to 1e-6, for every anchor.

The same comparison is then made with a trainer that is wrong in one way: it must fail every time. Losses and
accuracies do not betray such mistakes (a drafter trained with its anchor's state visible looks better).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.data.document import Document
from draftline.data.rows import RowShape, row_from_documents
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import block_positions, block_token_ids
from draftline.drafter.draft import BlockDrafter, one_block
from tests.oracles.tiny import (
    FULL,
    MIXED,
    TinyRow,
    packed_row,
    random_drafter,
    row_hidden,
    row_masks,
    tiny_spec,
)

LAYOUTS = {
    "full": {"layer_types": FULL},
    "mixed": {"layer_types": MIXED, "sliding_window": 6},
    "mixed, both ways": {"layer_types": MIXED, "sliding_window": 6, "is_causal": False},
}
PACKINGS = {"alone": (40,), "packed": (17, 9, 14)}
TOLERANCE = 1e-6


class Text:
    """A packed row with tokens, and the frozen embedding and head that go with its drafter."""

    def __init__(self, layout: dict[str, object], lengths: tuple[int, ...]) -> None:
        self.drafter = random_drafter(tiny_spec(**layout))
        spec = self.drafter.spec
        generator = torch.Generator().manual_seed(5)
        shape = (spec.vocab_size, spec.hidden_size)
        self.embedding = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
        self.head = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
        row = packed_row(spec, lengths, list(range(sum(lengths))), num_padding=3)
        self.tokens = torch.randint(0, spec.mask_token_id, (len(row.positions),), generator=generator)
        ids = block_token_ids(self.tokens, row.anchors, row.anchor_valid, spec.mask_token_id, spec.block_size)
        self.row = replace(row, block_embeds=F.embedding(ids.flatten(), self.embedding))

    @torch.no_grad()
    def trained(self, row: TinyRow | None = None, masks: list[Tensor] | None = None) -> Tensor:
        """Logits [anchors, B-1, V] of every valid block of the training row."""
        row = row or self.row
        attend = sdpa_attend(masks or row_masks(self.drafter.spec, row))
        hidden = row_hidden(self.drafter, row, attend)[self.row.anchor_valid]
        return F.linear(hidden[:, 1:], self.head)

    @torch.no_grad()
    def decoded(self) -> Tensor:
        """The same logits from the decoder, document by document, observing a few tokens at a time."""
        logits = []
        for document in range(len(self.row.lengths)):
            places = (self.row.document_ids == document).nonzero()[:, 0]
            block = BlockDrafter(self.drafter, self.embedding, self.head, len(places))
            for place in places.tolist():
                logits.append(block.logits(int(self.tokens[place])))
                block.observe(self.row.taps[place : place + 1])
        return torch.stack(logits)

    def difference(self, row: TinyRow | None = None, masks: list[Tensor] | None = None) -> float:
        """Largest difference between training and decoding."""
        return (self.trained(row, masks) - self.decoded()).abs().max().item()


@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_block_in_training_is_the_block_in_decoding(layout, lengths):
    assert Text(layout, lengths).difference() < TOLERANCE


def anchor_state_leaks(text: Text) -> tuple[TinyRow, list[Tensor]]:
    """`key <= anchor` instead of `<`."""
    masks = row_masks(text.drafter.spec, text.row)
    for block, anchor in enumerate(text.row.anchors[text.row.anchor_valid].tolist()):
        queries = slice(block * text.drafter.spec.block_size, (block + 1) * text.drafter.spec.block_size)
        for mask in masks:
            mask[queries, anchor] = True
    return text.row, masks


def neighbouring_block_leaks(text: Text) -> tuple[TinyRow, list[Tensor]]:
    """Every block also sees the block before it."""
    size, num_context = text.drafter.spec.block_size, len(text.row.positions)
    masks = row_masks(text.drafter.spec, text.row)
    for mask in masks:
        for block in range(1, int(text.row.anchor_valid.sum())):
            first = num_context + (block - 1) * size
            mask[block * size : (block + 1) * size, first : first + size] = True
    return text.row, masks


def neighbouring_document_leaks(text: Text) -> tuple[TinyRow, list[Tensor]]:
    """The row is taken for one document."""
    row = replace(text.row, document_ids=torch.zeros_like(text.row.document_ids))
    return text.row, row_masks(text.drafter.spec, row)


def window_hangs_on_the_anchor(text: Text) -> tuple[TinyRow, list[Tensor]]:
    """The lower bound of a window from the anchor's position for the whole block, as speculators has it."""
    spec, row = text.drafter.spec, text.row
    masks = row_masks(spec, row)
    for layer, mask in enumerate(masks):
        if spec.window_of(layer) is not None:
            by_slot = mask.unflatten(0, (-1, spec.block_size))
            by_slot[:, :, : len(row.positions)] = by_slot[:, :1, : len(row.positions)].clone()
    return row, masks


def block_is_causal(text: Text) -> tuple[TinyRow, list[Tensor]]:
    """Full layers look back only."""
    spec = text.drafter.spec.model_copy(update={"is_causal": True})
    return text.row, row_masks(spec, text.row)


@pytest.mark.parametrize(
    ("mistake", "layout"),
    [
        (anchor_state_leaks, "full"),
        (neighbouring_block_leaks, "full"),
        (neighbouring_document_leaks, "full"),
        (window_hangs_on_the_anchor, "mixed"),
        (block_is_causal, "full"),
    ],
)
def test_the_comparison_fails_for(mistake, layout):
    text = Text(LAYOUTS[layout], PACKINGS["packed"])
    assert text.difference(*mistake(text)) > 1000 * TOLERANCE


def test_the_comparison_fails_for_positions_that_are_not_reset_at_a_document():
    """Rotary angles are relative, so it shows where only the blocks, not the context, keep counting."""
    text = Text(LAYOUTS["full"], PACKINGS["packed"])
    positions = block_positions(torch.arange(len(text.row.positions)), text.row.anchors, 4)

    with torch.no_grad():
        hidden = text.drafter(
            text.row.block_embeds,
            text.row.taps,
            text.row.positions,
            positions.flatten(),
            sdpa_attend(row_masks(text.drafter.spec, text.row)),
        )
    trained = F.linear(hidden.unflatten(0, (-1, 4))[text.row.anchor_valid][:, 1:], text.head)

    assert (trained - text.decoded()).abs().max() > 1000 * TOLERANCE


def engine_block(text: list[int], anchor: int, mask_token_id: int, block_size: int, position: int):
    """What an engine feeds its drafter, in plain Python."""
    ids = [text[anchor]] + [mask_token_id] * (block_size - 1)
    return ids, [position + slot for slot in range(block_size)]


def test_a_training_row_lays_out_tokens_positions_and_labels_as_an_engine_does():
    shape = RowShape(
        token_budget=128, block_budget=32, block_size=4, anchors_per_document=16, decay_gamma=4.0, windows=()
    )
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 90, size=length).astype(np.int32) for length in (30, 41, 19)]
    documents = [Document(text, np.arange(len(text)) >= 8) for text in texts]
    row = row_from_documents(0, documents, shape, seed=3)
    ids = block_token_ids(row.input_ids, row.anchors, row.anchor_valid, 96, shape.block_size)
    positions = block_positions(row.positions, row.anchors, shape.block_size)
    assert int(row.anchor_valid.sum()) > 20

    for block, anchor in enumerate(row.anchors[row.anchor_valid].tolist()):
        document = int(row.document_ids[anchor])
        text, place = texts[document].tolist(), anchor - row.starts[document]
        expected = engine_block(text, place, 96, shape.block_size, place)
        assert (ids[block].tolist(), positions[block].tolist()) == expected
        for slot in range(1, shape.block_size):
            inside = place + slot < len(text)
            assert (row.weights[block, slot] > 0) == inside
            assert not inside or row.labels[block, slot] == text[place + slot]


def test_the_decoder_lays_out_a_block_as_an_engine_does():
    text = [5, 9, 13, 2, 7]
    ids, positions = one_block(text[-1], len(text) - 1, tiny_spec(), torch.device("cpu"))
    assert (ids[0].tolist(), positions[0].tolist()) == engine_block(text, 4, 96, 4, 4)
