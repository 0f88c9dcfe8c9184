"""An exported folder: what z-lab's code and transformers make of it, and what the proof catches."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.errors import CheckpointError, ConfigError, DiskFullError
from draftline.serving.export import config_json, export_drafter, prove_export, serving_tensors
from draftline.serving.importing import load_drafter
from tests.oracles.tiny import FULL, MIXED, packed_row, random_drafter, row_hidden, tiny_spec
from tests.oracles.zlab import dflash_model, zlab_block

SLIDING = ("sliding_attention",) * 3
LAYOUTS = {
    "full": {"layer_types": FULL},
    "mixed": {"layer_types": MIXED, "sliding_window": 6},
    "mixed, both ways": {"layer_types": MIXED, "sliding_window": 6, "is_causal": False},
    "sliding": {"layer_types": SLIDING, "sliding_window": 6},
    "sliding, both ways": {"layer_types": SLIDING, "sliding_window": 6, "is_causal": False},
}


def bf16_drafter(**changes):
    """A random fp32 drafter whose weights are exact in bf16, so that a file changes nothing."""
    drafter = random_drafter(tiny_spec(**changes), dtype=torch.bfloat16)
    return drafter.float()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_zlab_loads_the_folder_and_gives_the_same_logits_for_a_block(layout, tmp_path):
    drafter = bf16_drafter(**layout)
    folder = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    row = packed_row(drafter.spec, (30,), [11])
    head = torch.randn(97, 32, generator=torch.Generator().manual_seed(2))

    oracle, info = dflash_model.DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    embeds = row.block_embeds[: drafter.spec.block_size].float()
    expected = zlab_block(oracle, embeds, row.taps[:11].float()) @ head.T
    row = type(row)(**{**vars(row), "taps": row.taps.float(), "block_embeds": row.block_embeds.float()})
    ours = row_hidden(drafter, row)[0] @ head.T

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_export_reads_back_as_the_same_drafter(layout, tmp_path):
    drafter = bf16_drafter(**layout)

    spec, again = load_drafter(export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter"))

    assert [spec.causal_in_block(i) for i in range(3)] == [drafter.spec.causal_in_block(i) for i in range(3)]
    assert spec.model_copy(update={"is_causal": drafter.spec.is_causal}) == drafter.spec
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name].float(), tensor)


def test_the_weights_file_is_bf16_and_marked_for_pytorch(tmp_path):
    drafter = bf16_drafter()
    folder = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 3 + 11 * drafter.spec.num_layers
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_weights_that_are_views_of_one_buffer_are_written_apart(tmp_path):
    drafter = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    weights = dict(drafter.state_dict())
    weights["hidden_norm.weight"] = weights["norm.weight"]

    _, again = load_drafter(export_drafter(drafter.spec, weights, tmp_path / "drafter"))

    assert torch.equal(again.hidden_norm.weight, again.norm.weight)


def test_both_spellings_of_rope_theta_are_there_and_transformers_reads_one(tmp_path):
    drafter = bf16_drafter(rope_theta=5e6)
    folder = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    written = json.loads((folder / "config.json").read_text())

    assert (written["rope_theta"], written["rope_scaling"]) == (5e6, None)
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e6}
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 5e6


def test_every_key_that_an_engine_may_look_for_is_where_it_looks():
    spec = tiny_spec(layer_types=SLIDING, sliding_window=6, input_embedding_scale=8.0)
    config = json.loads(config_json(spec))
    nested = config["dflash_config"]

    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == nested["block_size"] == spec.block_size
    assert config["num_target_layers"] == nested["num_target_layers"] == spec.num_target_layers
    assert nested["target_layer_ids"] == list(spec.target_layer_ids)
    assert nested["mask_token_id"] == spec.mask_token_id
    assert nested["input_embedding_scale"] == 8.0
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 6)
    assert "auto_map" not in config  # it would name a file that is not there


@pytest.mark.parametrize(
    ("layout", "written"),
    [("full", False), ("mixed", "absent"), ("mixed, both ways", False), ("sliding", True)],
)
def test_causality_is_written_whenever_all_layers_agree(layout, written):
    config = json.loads(config_json(tiny_spec(**LAYOUTS[layout])))
    assert config.get("is_causal", "absent") == written


def test_no_rope_setting_of_the_target_leaks_into_the_configuration():
    text = config_json(tiny_spec())
    assert not any(word in text for word in ("partial_rotary_factor", "mrope", "yarn"))


def test_a_missing_and_an_unused_tensor_are_both_named():
    drafter = bf16_drafter()
    weights = drafter.state_dict()
    weights["layers.0.self_attn.qq_proj.weight"] = weights.pop("layers.0.self_attn.q_proj.weight")

    with pytest.raises(CheckpointError) as refusal:
        serving_tensors(drafter.spec, weights)

    assert "missing: layers.0.self_attn.q_proj.weight" in str(refusal.value)
    assert "unused: layers.0.self_attn.qq_proj.weight" in str(refusal.value)


def test_the_proof_fails_when_one_weight_of_the_file_is_another(tmp_path):
    drafter = bf16_drafter()
    tensors = serving_tensors(drafter.spec, drafter.state_dict())
    folder = export_drafter(drafter.spec, tensors, tmp_path / "drafter")
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    damaged["layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match="computes something else"):
        prove_export(drafter.spec, tensors, folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 1e4), ("block_size", 8), ("target_layer_ids", [2, 4]), ("mask_token_id", 5)],
)
def test_the_proof_fails_when_the_configuration_says_something_else(key, value, tmp_path):
    drafter = bf16_drafter()
    tensors = serving_tensors(drafter.spec, drafter.state_dict())
    folder = export_drafter(drafter.spec, tensors, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["dflash_config"], config["rope_parameters"]):
        place.update({key: value} if key in place else {})
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=f"{key} .* became"):
        prove_export(drafter.spec, tensors, folder)


def test_another_drafter_in_the_folder_is_named_and_stays_unless_it_may_be_overwritten(tmp_path):
    first, wider, retrained = bf16_drafter(), bf16_drafter(intermediate_size=64), bf16_drafter()
    with torch.no_grad():
        retrained.norm.weight.add_(1.0)
    out = export_drafter(first.spec, first.state_dict(), tmp_path / "drafter")
    before = (out / "model.safetensors").read_bytes()

    for other, held in (
        (wider, r"another shape \(intermediate_size 64 here and 48 there\)"),
        (retrained, "same shape with other weights"),
    ):
        with pytest.raises(
            ConfigError, match=f"drafter holds a drafter of .*{held}; choose another folder, or --over"
        ):
            export_drafter(other.spec, other.state_dict(), out)
    assert (out / "model.safetensors").read_bytes() == before

    export_drafter(wider.spec, wider.state_dict(), out, overwrite=True)
    assert load_drafter(out)[0].intermediate_size == 64
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_the_same_drafter_is_written_anew_also_as_it_was_trained(tmp_path):
    drafter = bf16_drafter()
    masters = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter", card=lambda _: "old")
    export_drafter(drafter.spec, masters, tmp_path / "drafter", card=lambda _: "new")
    assert (tmp_path / "drafter" / "README.md").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_drafter_that_cannot_be_read_is_not_replaced_unasked(tmp_path):
    drafter = bf16_drafter()
    out = export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    (out / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="cannot be read"):
        export_drafter(drafter.spec, drafter.state_dict(), out)
    export_drafter(drafter.spec, drafter.state_dict(), out, overwrite=True)
    assert load_drafter(out)[0] == drafter.spec


def test_an_export_that_fails_in_any_way_leaves_nothing_half_written(tmp_path, monkeypatch):
    drafter = bf16_drafter()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFileSystem, "sync_file", full)
        with pytest.raises(DiskFullError, match="became full while exporting"):
            export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter", prove=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_behind_is_no_obstacle(tmp_path):
    drafter = bf16_drafter()
    (tmp_path / ".tmp-drafter").mkdir()
    (tmp_path / ".tmp-drafter" / "model.safetensors").write_bytes(b"cut")
    export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    drafter = bf16_drafter()
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="something other than an exported drafter"):
        export_drafter(drafter.spec, drafter.state_dict(), tmp_path)

    assert (tmp_path / "thesis.txt").read_text() == "years of work"
