"""The speculators format: every key that the library would otherwise fill in wrongly, and back again."""

from __future__ import annotations

import json

import pytest
import torch

from draftline.errors import ConfigError
from draftline.serving.export import export_speculators
from draftline.serving.importing import load_drafter
from draftline.serving.speculators import Verifier, speculators_config_json
from tests.oracles.tiny import FULL, MIXED, random_drafter, tiny_spec

VERIFIER = Verifier("owner/model", ("Qwen3ForCausalLM",))
LAYOUTS = [
    {"layer_types": FULL},
    {"layer_types": ("sliding_attention",) * 3, "sliding_window": 6},
    {"layer_types": MIXED, "sliding_window": 6, "is_causal": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_export_reads_back_as_the_same_drafter(layout, tmp_path):
    drafter = random_drafter(tiny_spec(**layout), dtype=torch.bfloat16)
    folder = export_speculators(drafter.spec, drafter.state_dict(), tmp_path / "drafter", VERIFIER)

    spec, again = load_drafter(folder, num_target_layers=6)

    assert spec == drafter.spec
    assert all(torch.equal(again.state_dict()[name], value) for name, value in drafter.state_dict().items())


def test_no_key_is_left_to_the_librarys_defaults():
    config = json.loads(speculators_config_json(tiny_spec(), VERIFIER))

    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 97
    assert config["block_size"] == 4
    assert config["aux_hidden_state_layer_ids"] == [2, 4]  # taps 1 and 3
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/model"
    assert config["sample_from_anchor"] is False
    assert "model_type" not in config


@pytest.mark.parametrize(("layout", "causal"), list(zip(LAYOUTS, [False, True, False], strict=True)), ids=str)
def test_causality_is_written_in_both_places_that_vllm_reads(layout, causal):
    config = json.loads(speculators_config_json(tiny_spec(**layout), VERIFIER))
    assert config["transformer_layer_config"]["is_causal"] is causal
    assert config["sliding_window_non_causal"] is not causal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": True}, "full layers that are causal"),
        ({"layer_types": MIXED, "sliding_window": 6}, "layers that differ in causality"),
        ({"input_embedding_scale": 8.0}, "scaled input embedding"),
    ],
)
def test_what_the_format_cannot_say_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        speculators_config_json(tiny_spec(**changes), VERIFIER)
