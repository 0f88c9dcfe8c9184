"""What a row costs, counted: against published counts, and against models that exist."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from draftline.config import DrafterSpec, TargetConfig
from draftline.drafter.model import Drafter
from draftline.embedded import embedded_path
from draftline.pipeline.costs import DrafterCost, count_target
from draftline.target.inspect import default_target_layer_ids
from draftline.target.load import build_model

# hidden, MLP, query heads, key-value heads, head dim, vocabulary, layers
SHAPES = {
    "135M": (576, 1536, 9, 3, 64, 49152, 30),
    "8B": (4096, 12288, 32, 8, 128, 151936, 36),
    "27B": (5120, 17408, 32, 8, 128, 248320, 64),
}


def drafter_spec(name: str, **changes: object) -> DrafterSpec:
    hidden, mlp, heads, kv_heads, head_dim, vocab, layers = SHAPES[name]
    values = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_layers": 5,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "block_size": 16,
        "mask_token_id": 0,
        "target_layer_ids": default_target_layer_ids(layers, 5),
        "num_target_layers": layers,
        "layer_types": ("full_attention",) * 5,
    }
    return DrafterSpec.model_validate({**values, **changes})


def target_config(name: str, **changes: object) -> Qwen3Config:
    hidden, mlp, heads, kv_heads, head_dim, vocab, layers = SHAPES[name]
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **changes,
    )


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    return build_model(TargetConfig(path="a/b"), config, torch.device("meta"))


@pytest.mark.parametrize(("name", "tera"), [("135M", 2.48), ("8B", 73.8), ("27B", 125.9)])
def test_a_step_of_4096_tokens_and_512_blocks_costs_the_published_operations(name: str, tera: float):
    cost = DrafterCost(drafter_spec(name), tokens=4096, blocks=512)
    assert cost.flops(document_tokens=4096) / 1e12 == pytest.approx(tera, rel=0.005)


@pytest.mark.parametrize(("name", "milliseconds"), [("135M", 1.7), ("8B", 74)])
def test_a_target_at_790_tflops_takes_the_published_time(name: str, milliseconds: float):
    spec = drafter_spec(name)
    cost = count_target(on_meta(target_config(name)), spec.target_layer_ids)
    assert cost.flops(4096, 4096) / 790e12 * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_the_drafters_weights_are_counted_exactly():
    spec = drafter_spec("135M", num_layers=3, layer_types=("full_attention",) * 3)
    counted = DrafterCost(spec, 128, 8).num_weights
    assert counted == sum(p.numel() for p in Drafter(spec).parameters())


@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_a_targets_weights_are_counted_exactly_and_tied_tables_once(name: str):
    from transformers import AutoModelForCausalLM

    path = embedded_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    counted = count_target(on_meta(AutoConfig.from_pretrained(path)), (0, 1))
    assert counted.num_weights == sum(p.numel() for p in model.parameters())
    assert counted.head_weights == model.get_output_embeddings().weight.numel()


def test_untied_tables_count_twice():
    spec = drafter_spec("135M")
    tied, untied = (
        count_target(on_meta(target_config("135M", tie_word_embeddings=tied)), spec.target_layer_ids)
        for tied in (True, False)
    )
    assert untied.head_weights == tied.head_weights
    assert untied.num_weights == tied.num_weights + tied.head_weights


def test_layers_after_the_last_tap_cost_nothing():
    early, late = (count_target(on_meta(target_config("135M")), (1, last)) for last in (9, 19))
    assert late.active_weights == 2 * early.active_weights
    assert late.attention_width == 2 * early.attention_width
    assert late.num_weights == early.num_weights


def test_a_recurrent_layer_has_no_scores():
    config = AutoConfig.from_pretrained(embedded_path("hybrid"))
    text = config.get_text_config()
    counted = count_target(on_meta(config), (text.num_hidden_layers - 1,))
    attending = text.layer_types.count("full_attention")
    assert 0 < attending < text.num_hidden_layers
    assert counted.attention_width == attending * text.num_attention_heads * text.head_dim


def test_of_a_mixture_only_the_chosen_experts_work():
    def active(chosen: int) -> int:
        config = Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=chosen,
        )
        return count_target(on_meta(config), (1,)).active_weights

    one_expert = 3 * 64 * 32
    assert active(3) - active(2) == pytest.approx(2 * one_expert, abs=4)  # two layers
