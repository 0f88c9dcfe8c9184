"""Taps are the layers' own outputs, for every family, alone or packed, and nothing else of the model is touched."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from draftline.errors import ConfigError
from draftline.target.attention import Packing, UnsupportedPackingError, packed_attention
from draftline.target.forward import Form, TappedForward, decoder_layers, share_weights
from draftline.target.states import BlockTokens
from tests.target_families import BATCHED, FAMILIES, HIDDEN, NUM_LAYERS, PACKED, VOCAB, model, wide_model

TAPS = (3, 0, 4)  # neither sorted nor complete; the last layer is below
BUDGET = 256
FORMS: list[tuple[str, Form]] = [
    *((family, "packed") for family in PACKED),
    *((family, "batched") for family in FAMILIES),
]


def row(*lengths: int, seed: int = 0) -> Row:
    draws = np.random.default_rng(seed)
    documents = [
        Document(draws.integers(0, VOCAB, length).astype(np.int32), np.ones(length, dtype=bool))
        for length in lengths
    ]
    return row_from_documents(0, documents, RowShape(BUDGET, 8, 16, 8, 4.0, ()), seed=0)


@torch.inference_mode()
def layer_outputs(target: PreTrainedModel, ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """[tokens, K * D] as transformers itself reports them; entry i + 1 is the output of layer i, but the last
    entry of all is the final norm's."""
    states = target(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    assert max(taps) < NUM_LAYERS - 1
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1)


def taps_of(
    family: str, form: Form, loaded: Row, taps: tuple[int, ...] = TAPS, max_documents: int = 8
) -> Tensor:
    forward = TappedForward(model(family), taps, BUDGET, max_documents, form)
    forward.load(loaded)
    return forward.run().clone()


def documents_of(loaded: Row) -> list[slice]:
    return [slice(a, b) for a, b in zip(loaded.starts, loaded.starts[1:], strict=False)]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_taps_are_the_outputs_of_their_layers_in_the_given_order(family: str, form: Form):
    loaded, target = row(37, 61, 1, 90), wide_model(family)
    forward = TappedForward(target, TAPS, BUDGET, 8, form)
    forward.load(loaded)
    taps = forward.run()
    assert taps.shape == (BUDGET, len(TAPS) * HIDDEN)
    tolerance = 1e-8 if taps.dtype == torch.float64 else 1e-4
    for document in documents_of(loaded):
        expected = layer_outputs(target, loaded.input_ids[document], TAPS)
        torch.testing.assert_close(taps[document], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("family", "form"), [("qwen3", "packed"), ("gemma3", "batched")])
def test_the_raw_embedding_rows_of_a_rows_blocks_come_with_its_taps(family: str, form: Form):
    target, mask, num_blocks = model(family), 7, 8
    forward = TappedForward(target, TAPS, BUDGET, 8, form, blocks=BlockTokens(num_blocks, mask))
    weight = target.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    places = forward.states.token_rows.data_ptr()
    for lengths in ((40, 50), (3,)):  # the second has no room for all blocks
        loaded = row(*lengths)
        forward.load(loaded)
        taps = forward.run()
        valid = loaded.anchor_valid
        rows = forward.states.token_rows
        assert torch.equal(rows[:-1][valid], weight[loaded.input_ids[loaded.anchors[valid]]])
        assert torch.equal(rows[:-1][~valid], weight[mask].expand(int((~valid).sum()), -1))
        assert torch.equal(rows[-1], weight[mask])
        assert torch.equal(forward.states.buffer, torch.cat([taps.flatten(), rows.flatten()]))
    assert not valid.all()
    assert rows.data_ptr() == places


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_padding_tokens_hold_finite_states(family: str, form: Form):
    loaded = row(37, 61)
    assert taps_of(family, form, loaded)[loaded.starts[-1] :].isfinite().all()


def test_the_last_layer_is_tapped_before_the_final_norm():
    loaded = row(40)
    (tap,) = documents_of(loaded)
    raw = taps_of("qwen3", "packed", loaded, (NUM_LAYERS - 1,))[tap]
    with torch.inference_mode():
        states = model("qwen3")(
            input_ids=loaded.input_ids[None, tap], use_cache=False, output_hidden_states=True
        ).hidden_states
        normed = model("qwen3").model.norm(raw)
    torch.testing.assert_close(normed, states[-1][0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(raw, states[-1][0], atol=0.1)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_a_row_leaves_nothing_behind_for_the_next(family: str, form: Form):
    first, second = row(90, 20, seed=1), row(30, 30, 30, seed=2)
    forward = TappedForward(model(family), TAPS, BUDGET, 8, form)
    forward.load(first)
    forward.run()
    forward.load(second)
    after = forward.run()[: second.starts[-1]].clone()
    assert torch.equal(after, taps_of(family, form, second)[: second.starts[-1]])


def test_nothing_after_the_last_tap_is_computed():
    forward = TappedForward(model("qwen3"), (1, 2), BUDGET, 8, "packed")
    assert len(forward.layers) == 3
    assert len(decoder_layers(model("qwen3"))[2]) == NUM_LAYERS


def hooks_of(target: PreTrainedModel) -> list[int]:
    """Forward hooks on each layer; transformers leaves some of its own once it was asked for hidden states."""
    return [len(layer._forward_hooks) for layer in decoder_layers(target)[2]]


def test_workers_share_the_weights_and_nothing_else():
    before, hooks = model("qwen3").config.to_dict(), hooks_of(model("qwen3"))
    forwards = [TappedForward(model("qwen3"), (tap,), BUDGET, 8, "packed") for tap in (1, 3)]
    for forward in forwards:
        theirs = dict(model("qwen3").model.named_parameters())
        for name, parameter in forward.body.named_parameters():
            assert parameter is theirs[name]
    assert model("qwen3").config.to_dict() == before
    assert model("qwen3").config._attn_implementation != "draftline_packed"
    assert hooks_of(model("qwen3")) == hooks
    loaded = row(40, 30)
    for forward in forwards:
        forward.load(loaded)
    outputs = [forward.run() for forward in forwards]
    for tap, output in zip((1, 3), outputs, strict=True):
        assert torch.equal(output, taps_of("qwen3", "packed", loaded, (tap,)))


def test_buffers_are_shared_too_so_that_a_copy_costs_no_memory():
    original, copy = model("qwen3"), share_weights(model("qwen3"))
    for ours, theirs in zip(copy.buffers(), original.buffers(), strict=True):
        assert ours is theirs


def test_a_row_with_exactly_the_most_documents_fits_and_one_more_is_refused():
    assert taps_of("qwen3", "packed", row(9, 9, 9), max_documents=3).isfinite().all()
    with pytest.raises(ConfigError, match="row 0 holds 4 documents, more than the 3 that fit its tables"):
        taps_of("qwen3", "packed", row(9, 9, 9, 9), max_documents=3)


def test_addresses_stay_from_row_to_row_in_the_packed_form():
    """A captured graph reads them."""
    forward = TappedForward(model("qwen3"), TAPS, BUDGET, 8, "packed")
    fixed = [
        forward.out,
        forward.input_ids,
        forward.positions,
        forward.packing.cu_seqlens,
        forward.packing.document_ids,
    ]
    before = [tensor.data_ptr() for tensor in fixed]
    for lengths in ((40,), (10, 20, 30), (256,)):
        forward.load(row(*lengths))
        assert forward.run() is forward.out
    assert [tensor.data_ptr() for tensor in fixed] == before


def test_a_model_without_a_list_of_its_layers_is_refused():
    short = share_weights(model("qwen3"))
    short.config.num_hidden_layers = NUM_LAYERS + 1
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no list of 7 decoder layers"):
        decoder_layers(short)


@cache
def packing() -> Packing:
    """Documents of 3 and 2 tokens and one token of padding."""
    return Packing(
        cu_seqlens=torch.tensor([0, 3, 5, 6, 6], dtype=torch.int32),
        document_ids=torch.tensor([0, 0, 0, 1, 1, -1], dtype=torch.int32),
        max_document=6,
        kernel="mask",
    )


def test_a_query_sees_earlier_tokens_of_its_own_document():
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert packing().mask(None).int().tolist() == expected


def test_a_window_counts_the_token_itself():
    window = packing().mask(2).int().tolist()
    assert window[2] == [0, 1, 1, 0, 0, 0]
    assert window[4] == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}])
def test_what_packed_rows_cannot_express_is_refused_instead_of_left_out(extra: dict):
    x = torch.zeros(1, 2, 6, 8)
    with pytest.raises(UnsupportedPackingError):
        packed_attention(torch.nn.Identity(), x, x, x, None, **extra)
    with pytest.raises(UnsupportedPackingError):
        packed_attention(torch.nn.Identity(), x, x, x, torch.zeros(6, 6))


@pytest.mark.parametrize("kernel", ["varlen", "flash"])
@pytest.mark.parametrize(("head", "values"), [(512, 512), (192, 128)])
def test_heads_that_a_kernel_of_packed_rows_does_not_compute_need_the_batched_form(kernel, head, values):
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    module: Any = torch.nn.Identity()
    module.draftline_packing = Packing(bounds, torch.zeros(6, dtype=torch.int32), 6, kernel)
    q, v = torch.zeros(1, 2, 6, head), torch.zeros(1, 2, 6, values)
    with pytest.raises(UnsupportedPackingError, match=f"heads of {head} with values of {values}"):
        packed_attention(module, q, q, v, None)
    module.draftline_packing.kernel = "mask"
    assert packed_attention(module, q, q, v, None)[0].shape == (1, 6, 2, values)


def test_families_of_both_kinds_are_covered():
    assert {*PACKED, *BATCHED} == set(FAMILIES)
