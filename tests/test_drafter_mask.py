"""The visibility rule: against a literal transcription, and by changing what must not be seen."""

from __future__ import annotations

import pytest
import torch

from draftline.drafter.mask import block_mask_dense, decoding_mask
from tests.oracles.tiny import FULL, MIXED, packed_row, random_drafter, row_hidden, row_masks, tiny_spec

WINDOWS = [(None, False), (None, True), (6, True), (6, False)]


def literal_rule(row, block_size, window, causal):
    """The rule of mask.py one pair at a time, in plain Python."""
    num_context, num_queries = len(row.positions), len(row.anchors) * block_size
    mask = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for query in range(num_queries):
        block, slot = divmod(query, block_size)
        if not row.anchor_valid[block]:
            continue
        anchor = int(row.anchors[block])
        for key in range(anchor):
            near = window is None or row.positions[key] > row.positions[anchor] + slot - window
            mask[query, key] = bool(near) and bool(row.document_ids[key] == row.document_ids[anchor])
        for other_slot in range(slot + 1 if causal else block_size):
            mask[query, num_context + block * block_size + other_slot] = True
    return mask


@pytest.mark.parametrize(("window", "causal"), WINDOWS)
def test_the_rule_equals_its_literal_transcription(window, causal):
    spec = tiny_spec()
    row = packed_row(spec, (17, 9, 14), [0, 1, 7, 16, 17, 20, 26, 33, 39], num_padding=3)

    dense = block_mask_dense(
        row.anchors,
        row.anchor_valid,
        row.document_ids,
        row.positions,
        block_size=spec.block_size,
        window=window,
        causal=causal,
    )

    assert torch.equal(dense, literal_rule(row, spec.block_size, window, causal))


@pytest.mark.parametrize(("window", "causal"), WINDOWS)
@pytest.mark.parametrize("context_len", [0, 1, 5, 23])
def test_one_block_when_decoding_sees_what_it_sees_in_training(window, causal, context_len):
    spec = tiny_spec()
    row = packed_row(spec, (context_len + 1,), [context_len])
    trained = literal_rule(row, spec.block_size, window, causal)[: spec.block_size]
    block = slice(context_len + 1, context_len + 1 + spec.block_size)
    expected = torch.cat([trained[:, :context_len], trained[:, block]], dim=1)

    decoding = decoding_mask(
        context_len, block_size=spec.block_size, window=window, causal=causal, device=torch.device("cpu")
    )

    assert torch.equal(expected, torch.ones_like(expected) if decoding is None else decoding)


@pytest.mark.parametrize("layers", [{"layer_types": FULL}, {"layer_types": MIXED, "sliding_window": 6}])
def test_a_token_at_or_after_the_anchor_never_changes_the_block(layers):
    drafter = random_drafter(tiny_spec(**layers))
    row = packed_row(drafter.spec, (30,), [5, 11, 24])
    before = row_hidden(drafter, row)

    row.taps[11:] += 7.0
    after = row_hidden(drafter, row)

    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[2], after[2])


def test_the_token_right_before_the_anchor_is_seen():
    drafter = random_drafter(tiny_spec())
    row = packed_row(drafter.spec, (30,), [11])
    before = row_hidden(drafter, row)

    row.taps[10] += 7.0

    assert (row_hidden(drafter, row)[0] - before[0]).abs().max() > 1e-3


def test_a_document_never_changes_the_blocks_of_another():
    drafter = random_drafter(tiny_spec())
    row = packed_row(drafter.spec, (12, 15, 9), [4, 11, 12, 20, 26, 27, 31], num_padding=4)
    before = row_hidden(drafter, row)

    row.taps[12:27] += 7.0
    after = row_hidden(drafter, row)

    in_second = (row.anchors >= 12) & (row.anchors < 27) & row.anchor_valid
    assert torch.equal(before[~in_second], after[~in_second])
    # The block that starts a document sees no context, so only the two later ones can move.
    assert (before != after)[in_second].flatten(1).any(dim=1).tolist() == [False, True, True]


def test_a_block_never_changes_another_block():
    drafter = random_drafter(tiny_spec())
    row = packed_row(drafter.spec, (30,), [5, 11, 12, 24])
    before = row_hidden(drafter, row)

    row.block_embeds.unflatten(0, (-1, drafter.spec.block_size))[1] += 7.0
    after = row_hidden(drafter, row)

    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1])


def test_a_block_that_is_not_valid_sees_nothing():
    spec = tiny_spec(layer_types=MIXED, sliding_window=6)
    row = packed_row(spec, (12, 15), [4, 20])
    invalid = ~row.anchor_valid.repeat_interleave(spec.block_size)

    for mask in row_masks(spec, row):
        assert not mask[invalid].any()
        assert mask[~invalid].any(dim=1).all()
