"""Every target is tested on itself: packed when that is exact, batched when only that is, else refused."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftline.errors import ConfigError
from draftline.target.forward import decoder_layers, share_weights
from draftline.target.rounding import TOLERANCE, rounding_limit
from draftline.target.selftest import choose_form
from tests.target_families import BATCHED, GATED_DELTA, PACKED, SHAPE, model

TAPS = (1, 3, 4)


@pytest.mark.parametrize("family", PACKED)
def test_a_target_whose_layers_all_attend_runs_packed(family: str):
    choice = choose_form(model(family), TAPS)
    assert choice.form == "packed"
    how = "to rounding (experts)" if "experts" in choice.reason and "moe" in family else "to the bit"
    assert choice.reason.startswith(f"isolated {how}; distance to documents alone ")


@pytest.mark.parametrize("family", BATCHED)
def test_a_target_that_packed_rows_cannot_express_runs_batched(family: str):
    assert choose_form(model(family), TAPS).form == "batched"


def test_a_hybrid_runs_batched_because_its_recurrent_layers_leak():
    reason = choose_form(model("hybrid"), TAPS).reason
    assert "packed, a document moves by" in reason
    assert "batched, the distance to documents alone is" in reason


def test_taps_decide_what_runs():
    """What comes after the last tap is cut away and cannot leak."""
    layers = ["full_attention", "full_attention", *["linear_attention"] * 4]
    config = Qwen3_5TextConfig(**SHAPE, **{**GATED_DELTA, "layer_types": layers})
    target = Qwen3_5ForCausalLM(config).eval().requires_grad_(requires_grad=False)
    assert choose_form(target, (0, 1)).form == "packed"
    assert choose_form(target, (0, 2)).form == "batched"


def with_a_last_word(target: PreTrainedModel, change: Any) -> PreTrainedModel:
    """The target with `change` laid over the output of its second layer."""
    own = share_weights(target)

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    decoder_layers(own)[2][1].register_forward_hook(hook)
    return own


def sees_the_whole_batch(states: Tensor) -> Tensor:
    return states + states.mean(dim=(0, 1), keepdim=True)


def sees_the_next_token(states: Tensor) -> Tensor:
    return states + states.roll(-1, dims=1)


def sees_one_token_back_even_across_documents(states: Tensor) -> Tensor:
    """As a short convolution does: exact alone and in a batch, a leak in a packed row."""
    return states + torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("leak", [sees_the_whole_batch, sees_the_next_token])
def test_a_target_that_is_not_the_same_alone_and_among_others_is_refused_with_the_figures(leak: Any):
    with pytest.raises(
        ConfigError, match=r"does not give a document the same taps .*packed.*batched.*allowed"
    ):
        choose_form(with_a_last_word(model("qwen3"), leak), TAPS)


def test_a_leak_of_one_token_is_enough_to_leave_the_packed_form():
    choice = choose_form(with_a_last_word(model("qwen3"), sees_one_token_back_even_across_documents), TAPS)
    assert choice.form == "batched"


def whisper(states: Tensor) -> Tensor:
    return states + 1e-6 * states.mean(dim=(0, 1), keepdim=True)


def test_a_leak_of_the_last_bit_is_seen():
    with pytest.raises(ConfigError, match="a document moves"):
        choose_form(with_a_last_word(model("qwen3"), whisper), TAPS)


def test_experts_may_round_otherwise_among_other_tokens_but_not_leak():
    """How many rows an expert's matrix has depends on all tokens of the row, and so does its rounding."""
    mixture = model("qwen3 moe")
    choice = choose_form(with_a_last_word(mixture, whisper), TAPS)
    assert choice.form == "packed"
    assert choice.reason.startswith("isolated to rounding (experts)")
    with pytest.raises(ConfigError, match="does not give a document the same taps"):
        choose_form(with_a_last_word(mixture, sees_the_whole_batch), TAPS)


def with_a_sink(states: Tensor) -> Tensor:
    """Some tokens a thousand times as large as the rest, as the first one often is in trained targets."""
    return torch.where(states[..., :1] > 1.5 * states[..., :1].std(), 1000 * states, states)


def test_a_few_huge_tokens_do_not_hide_what_happens_to_the_others():
    def wrong(states: Tensor) -> Tensor:
        length = states.shape[1]  # the same for all documents of a row, another alone
        return with_a_sink(states) + 1e-4 * length * states.std() * (states[..., :1] < 0)

    with pytest.raises(ConfigError, match="does not give a document the same taps"):
        choose_form(with_a_last_word(model("qwen3"), wrong), TAPS)


def test_a_look_at_the_next_document_is_a_leak():
    with pytest.raises(ConfigError, match=r"packed, a document moves by [1-9]"):
        choose_form(with_a_last_word(model("qwen3"), sees_the_next_token), TAPS)


def test_half_precision_rounds_but_does_not_leak():
    half = copy.deepcopy(model("llama")).bfloat16()
    choice = choose_form(half, TAPS)
    assert choice.form == "packed"
    assert float(choice.reason.split()[-1]) > 1e-5


def test_the_test_leaves_the_target_as_it_was():
    layers = decoder_layers(model("qwen3"))[2]
    before, hooks = model("qwen3").config.to_dict(), [len(layer._forward_hooks) for layer in layers]
    choose_form(model("qwen3"), TAPS)
    assert model("qwen3").config.to_dict() == before
    assert [len(layer._forward_hooks) for layer in layers] == hooks


def test_states_that_are_not_finite_are_told_apart_from_a_leak():
    overflows = with_a_last_word(model("qwen3"), lambda states: states * torch.inf)
    with pytest.raises(ConfigError, match=r"not finite from tap 1 on .*float32 is too narrow"):
        choose_form(overflows, TAPS)
    assert choose_form(overflows, (0,)).form == "packed", "before the fault everything is sound"


def test_a_weight_that_is_not_finite_is_named():
    broken = copy.deepcopy(model("qwen3"))
    weight = broken.get_parameter("model.layers.2.mlp.up_proj.weight")
    weight[0, 0] = torch.nan
    with pytest.raises(
        ConfigError, match=r"not finite from tap 3 on .*model\.layers\.2\.mlp\.up_proj\.weight"
    ):
        choose_form(broken, (3, 1, 4))


def deep_target(dtype: torch.dtype) -> PreTrainedModel:
    """62 random layers that let a difference grow, as wide ones do."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=62, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.35,
    )  # fmt: skip
    return cast("Any", Qwen3ForCausalLM(config)).to(dtype).eval().requires_grad_(requires_grad=False)


def test_a_deep_target_may_be_as_far_off_as_its_own_rounding_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        TOLERANCE, torch.bfloat16, 5e-3
    )  # what is usual, less than these few channels make of it
    target, taps = deep_target(torch.bfloat16), (1, 30, 58)
    choice = choose_form(target, taps)
    assert choice.form == "packed"
    assert float(choice.reason.split()[-1]) > TOLERANCE[torch.bfloat16]
    with pytest.raises(ConfigError, match="does not give a document the same taps"):
        choose_form(with_a_last_word(target, sees_the_whole_batch), taps)


def test_what_rounding_does_is_asked_of_the_target_only_if_it_matters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftline.target.rounding.taps_alone", lambda *_: pytest.fail("the target ran"))
    assert rounding_limit(model("qwen3"), TAPS, [torch.arange(5)], 1e-5) == TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.05, 0.5)]
)
def test_the_limit_follows_the_type_that_rounds(dtype: torch.dtype, least: float, most: float):
    documents = [torch.arange(40)]
    assert least <= rounding_limit(deep_target(dtype), (1, 30, 58), documents, found=1.0) <= most
