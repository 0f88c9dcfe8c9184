"""From a target to a drafter's architecture: taps, mask token, rotary base, shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from draftline.config import DrafterConfig, DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.serving.export import config_json
from draftline.target.inspect import (
    context_limit,
    default_target_layer_ids,
    resolve_mask_token_id,
    resolve_spec,
    resolve_target_layer_ids,
    stop_token_ids,
)
from tests.target_families import EXPERTS, GATED_DELTA, SHAPE, VOCAB, tokenizer

# dflash.md 1.2, checked there against z-lab's own function.
PUBLISHED = {
    28: [[1, 13, 25], [1, 7, 13, 19, 25], [1, 6, 11, 15, 20, 25], [1, 4, 8, 11, 15, 18, 22, 25]],
    32: [[1, 15, 29], [1, 8, 15, 22, 29], [1, 7, 12, 18, 23, 29], [1, 5, 9, 13, 17, 21, 25, 29]],
    36: [[1, 17, 33], [1, 9, 17, 25, 33], [1, 7, 14, 20, 27, 33], [1, 6, 10, 15, 19, 24, 28, 33]],
    40: [[1, 19, 37], [1, 10, 19, 28, 37], [1, 8, 15, 23, 30, 37], [1, 6, 11, 16, 22, 27, 32, 37]],
    48: [[1, 23, 45], [1, 12, 23, 34, 45], [1, 10, 19, 27, 36, 45], [1, 7, 14, 20, 26, 32, 39, 45]],
    64: [[1, 31, 61], [1, 16, 31, 46, 61], [1, 13, 25, 37, 49, 61], [1, 10, 18, 27, 35, 44, 52, 61]],
}


@pytest.mark.parametrize("num_layers", PUBLISHED)
def test_default_taps_are_the_published_ones(num_layers: int):
    taps = [list(default_target_layer_ids(num_layers, num_taps)) for num_taps in (3, 5, 6, 8)]
    assert taps == PUBLISHED[num_layers]


def test_a_single_tap_is_the_middle_layer():
    assert default_target_layer_ids(36, 1) == (18,)


@given(st.integers(5, 130), st.data())
def test_default_taps_are_distinct_layers_below_the_last(num_layers: int, data: st.DataObject):
    num_taps = data.draw(st.integers(1, min(12, num_layers - 3)))
    taps = resolve_target_layer_ids(DrafterConfig(num_taps=num_taps), num_layers)
    assert len(set(taps)) == num_taps
    assert all(0 < tap <= num_layers - 3 for tap in taps)


@pytest.mark.parametrize(
    ("num_taps", "num_layers", "most"), [(5, 6, 3), (2, 4, 1), (2, 2, 1), (2, 1, 1), (5, 1, 1), (3, 5, 2)]
)
def test_default_taps_that_a_target_is_too_shallow_for_come_with_what_fits(
    num_taps: int, num_layers: int, most: int
):
    words = (
        rf"drafter\.num_taps={num_taps} needs a target of at least {num_taps + 3} layers, this one has {num_layers}; "
        rf"use at most drafter\.num_taps={most}, or name layers \(0\.\.{num_layers - 1}\) in drafter\.target_layer_ids"
    )
    with pytest.raises(ConfigError, match=words):
        resolve_target_layer_ids(DrafterConfig(num_taps=num_taps), num_layers)
    assert len(resolve_target_layer_ids(DrafterConfig(num_taps=most), num_layers)) == most
    assert len(resolve_target_layer_ids(DrafterConfig(num_taps=num_taps), num_taps + 3)) == num_taps


def taps_of(*ids: int, num_layers: int = 28) -> tuple[int, ...]:
    return resolve_target_layer_ids(DrafterConfig(target_layer_ids=ids), num_layers)


def test_given_taps_keep_their_order_because_fusion_concatenates_in_it():
    assert taps_of(20, 3, 11) == (20, 3, 11)


def test_negative_taps_count_from_the_last_layer():
    assert taps_of(0, -1, -28 + 5) == (0, 27, 5)


@pytest.mark.parametrize("ids", [(3, 3), (3, -25)])
def test_a_layer_named_twice_is_refused(ids: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"taps \[3, 3\] name a layer twice; .* name each layer once"):
        taps_of(*ids)


@pytest.mark.parametrize("tap", [28, 100, -29])
def test_a_tap_outside_the_target_is_refused(tap: int):
    with pytest.raises(ConfigError, match=rf"tap {tap} is outside the target's layers 0\.\.27"):
        taps_of(1, tap)


def test_an_empty_list_of_taps_is_refused():
    with pytest.raises(ValidationError, match="target_layer_ids"):
        DrafterConfig(target_layer_ids=())


def mask_of(wanted: int | None, rows: int = VOCAB, stops: tuple[int, ...] = (), **special: str) -> int:
    return resolve_mask_token_id(wanted, tokenizer(VOCAB, **special), rows, stops)


def test_the_tokenizers_mask_token_is_taken():
    assert mask_of(None, mask_token="t9") == 9


def test_without_one_the_first_row_beyond_the_tokenizer_is_taken():
    assert mask_of(None, rows=128) == VOCAB


def test_with_neither_the_user_is_asked_for_one():
    with pytest.raises(ConfigError, match=r"no spare embedding row .* set drafter\.mask_token_id"):
        mask_of(None)


def test_a_tokenizer_with_gaps_does_not_lend_the_id_of_a_token():
    """Four tokens with ids up to 4: row 4 looks free by the tokenizer's length, but it is a token's."""
    words = WordLevel({"a": 0, "b": 1, "c": 2, "d": 4}, unk_token="a")
    gap = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    assert len(gap) == 4
    assert resolve_mask_token_id(None, gap, 8, ()) == 5
    with pytest.raises(ConfigError, match="the ordinary token 'd'"):
        resolve_mask_token_id(4, gap, 8, ())


def test_the_given_mask_wins_over_the_tokenizers():
    assert mask_of(7, mask_token="t9", cls_token="t7") == 7


def test_a_row_that_is_no_token_is_a_good_mask():
    assert mask_of(110, rows=128) == 110


@pytest.mark.parametrize("mask", [-1, VOCAB, 10**6])
def test_a_mask_outside_the_head_is_refused(mask: int):
    with pytest.raises(
        ConfigError, match=f"mask_token_id={mask} is outside the target's {VOCAB} embedding rows"
    ):
        mask_of(mask)


@pytest.mark.parametrize("mask", [5, 6, 8])
def test_a_mask_that_ends_text_or_pads_is_refused(mask: int):
    with pytest.raises(ConfigError, match="end-of-text or padding token"):
        mask_of(mask, eos_token="t5", pad_token="t6", cls_token="t8", stops=(5, 8))


def test_an_ordinary_token_is_refused_by_its_text():
    with pytest.raises(ConfigError, match="mask_token_id=12 is the ordinary token 't12'"):
        mask_of(12)


def test_a_tokenizers_own_mask_is_held_to_the_same_rules():
    with pytest.raises(ConfigError, match="end-of-text"):
        mask_of(None, mask_token="t9", pad_token="t9")


def spec_of(
    target: PreTrainedConfig, head_rows: int = VOCAB, scale: float = 1.0, **wanted: Any
) -> DrafterSpec:
    words = tokenizer(mask_token="t9", eos_token="t5", bos_token="t4")
    return resolve_spec(DrafterConfig(num_taps=3, **wanted), target, words, head_rows, scale)


def test_shapes_come_from_the_target():
    spec = spec_of(Qwen3Config(**SHAPE, rms_norm_eps=1e-5), head_rows=128, scale=2.5)
    assert (spec.hidden_size, spec.intermediate_size, spec.head_dim) == (32, 48, 16)
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)
    assert (spec.vocab_size, spec.num_target_layers, spec.max_position_embeddings) == (128, 6, 512)
    assert (spec.rms_norm_eps, spec.input_embedding_scale) == (1e-5, 2.5)
    assert (spec.bos_token_id, spec.eos_token_id, spec.pad_token_id, spec.mask_token_id) == (4, 5, None, 9)
    assert spec.target_layer_ids == (1, 2, 3)
    assert spec.layer_types == ("full_attention",) * 5
    assert spec.sliding_window is None


def test_given_shapes_win():
    wanted = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 24, "intermediate_size": 100, "num_layers": 2}
    spec = spec_of(Qwen3Config(**SHAPE), **wanted)
    assert {name: getattr(spec, name) for name in wanted} == wanted


def test_a_head_size_the_target_does_not_state_follows_from_its_width():
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    assert spec_of(LlamaConfig(**shape)).head_dim == SHAPE["hidden_size"] // SHAPE["num_attention_heads"]


def test_padded_vocabularies_keep_the_heads_rows():
    """Tokenizer of 97, head of 128: shapes use 128, as the engines' logits do."""
    assert spec_of(Qwen3Config(**{**SHAPE, "vocab_size": 128}), head_rows=128).vocab_size == 128


def base(theta: float) -> dict[str, Any]:
    """The rotary base as configurations of transformers 4 have it, at the top level."""
    return {"rope_theta": theta}


BASES = {
    "top level": (Qwen3Config(**SHAPE, **base(5e6)), 5e6),
    "rope_parameters": (
        Qwen3Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 7e6}),
        7e6,
    ),
    "default": (LlamaConfig(**SHAPE), 1e4),
    "mixture of experts": (Qwen3MoeConfig(**SHAPE, **EXPERTS, **base(3e6)), 3e6),
    "one per layer type": (
        Gemma3TextConfig(
            **SHAPE,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        2e6,
    ),
    "partial and multi-axis": (
        Qwen3_5TextConfig(
            **SHAPE,
            **GATED_DELTA,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        ),
        1e7,
    ),
    "stretched": (
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 8e5}),
        8e5,
    ),
}


@pytest.mark.parametrize(("target", "theta"), BASES.values(), ids=BASES.keys())
def test_only_the_rotary_base_is_taken_from_the_target(target: PreTrainedConfig, theta: float):
    spec = spec_of(target)
    assert spec.rope_theta == theta
    served = config_json(spec)
    for leaked in ("partial_rotary_factor", "mrope_section", "factor"):
        assert leaked not in served


@pytest.mark.parametrize("where", ["top level", "rope_parameters"])
def test_the_drafters_frequencies_are_the_targets(where: str):
    config, _ = BASES[where]
    target = Qwen3ForCausalLM(config)  # pyright: ignore[reportArgumentType]
    positions = torch.arange(0, 500, 7)
    theirs = target.model.rotary_emb(torch.zeros(1), positions[None])
    spec = spec_of(config)
    ours = Drafter(spec).rotary(positions)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.repeat(1, 2), other[0])


def test_the_language_part_of_a_multimodal_target_is_what_counts():
    spec = spec_of(Gemma3Config(text_config=Gemma3TextConfig(**SHAPE, rms_norm_eps=1e-4)))
    assert (spec.hidden_size, spec.num_target_layers, spec.rms_norm_eps) == (32, 6, 1e-4)


BAD_LAYERS = {
    r"layer_types has 1 entries for num_layers=2": {"layer_types": ("full_attention",)},
    r"sliding layers; set drafter\.sliding_window": {"layer_types": ("full_attention", "sliding_attention")},
    r"sliding_window=8 is smaller than block_size=16": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 8,
    },
}


@pytest.mark.parametrize(("message", "wanted"), BAD_LAYERS.items())
def test_layer_types_that_cannot_work_are_refused(message: str, wanted: dict[str, Any]):
    with pytest.raises(ConfigError, match=message):
        spec_of(Qwen3Config(**SHAPE), num_layers=2, **wanted)


def test_sliding_layers_keep_their_window():
    layers = ("sliding_attention", "full_attention")
    spec = spec_of(Qwen3Config(**SHAPE), num_layers=2, layer_types=layers, sliding_window=64)
    assert [spec.window_of(layer) for layer in range(2)] == [64, None]
    assert [spec.causal_in_block(layer) for layer in range(2)] == [True, False]


def test_answers_end_at_the_configurations_tokens_and_at_the_tokenizers():
    words = tokenizer(eos_token="t5")
    assert stop_token_ids(None, words) == (5,)
    assert stop_token_ids(7, words) == (5, 7)
    assert stop_token_ids([7, 5, 9], words) == (5, 7, 9)
    assert stop_token_ids(None, tokenizer()) == ()


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
            },
            131072,
        ),
    ],
)
def test_the_context_is_what_the_configuration_says_stretched_rope_included(fields, limit):
    assert context_limit(SimpleNamespace(**fields)) == limit
