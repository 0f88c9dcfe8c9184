"""Reading drafters of other trainers, strictly, and files from anyone, safely."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.errors import CheckpointError
from draftline.serving.export import config_json, export_drafter
from draftline.serving.importing import load_drafter, refuse_misfit
from draftline.serving.published import spec_from_config
from tests.oracles.targets import fitting_spec, random_target
from tests.oracles.tiny import random_drafter, tiny_spec


@pytest.fixture
def folder(tmp_path):
    drafter = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    return export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "drafter")


def edit(folder, **changes):
    """Change keys of a folder's configuration; None removes one."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config[key] = value
        if value is None:
            del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def rename(folder, names):
    """Rename tensors of a folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {names.get(name, name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def test_torchspec_names_are_understood(folder):
    before = load_drafter(folder)[1].state_dict()
    rename(
        folder,
        {
            "fc.weight": "context_proj.weight",
            "hidden_norm.weight": "context_norm.weight",
            "norm.weight": "final_norm.weight",
        },
    )

    after = load_drafter(folder)[1].state_dict()

    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_frozen_copy_of_the_targets_embedding_and_head_is_left_out(folder):
    tensors = load_file(folder / "model.safetensors")
    extra = {"embed_tokens.weight": torch.zeros(97, 32), "lm_head.weight": torch.zeros(97, 32)}
    save_file({**tensors, **extra}, folder / "model.safetensors")

    assert set(load_drafter(folder)[1].state_dict()) == set(tensors)


def test_a_number_of_taps_stored_as_the_number_of_target_layers_is_not_believed(folder):
    nested = {"mask_token_id": 96, "target_layer_ids": [1, 3], "block_size": 4}
    edit(folder, num_target_layers=2, dflash_config=nested)

    with pytest.raises(CheckpointError, match="does not tell how many layers the target has"):
        load_drafter(folder)
    assert load_drafter(folder, num_target_layers=6)[0].num_target_layers == 6


def speculators_config(spec, **changes):
    """What speculators writes for the same architecture."""
    layer = json.loads(config_json(spec))
    for key in ("dflash_config", "architectures", "block_size", "num_target_layers", "is_causal"):
        layer.pop(key, None)
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": spec.vocab_size,
        "block_size": spec.block_size,
        "target_hidden_size": spec.hidden_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in spec.target_layer_ids],
        "mask_token_id": spec.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **changes,
    }


def test_speculators_tap_ids_lose_the_one_they_count_for_the_embedding():
    spec = tiny_spec()
    read = spec_from_config(speculators_config(spec), "config.json", num_target_layers=6)
    assert read == spec


def test_a_reduced_vocabulary_is_refused():
    config = speculators_config(tiny_spec(), draft_vocab_size=50)
    with pytest.raises(CheckpointError, match="draft_vocab_size=50 of 97"):
        spec_from_config(config, "config.json", 6)


def test_a_window_in_model_optimizers_spelling_is_understood():
    config = json.loads(config_json(tiny_spec()))
    del config["is_causal"]
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 64, "causal": False}

    spec = spec_from_config(config, "config.json")

    assert spec.layer_types == ("sliding_attention",) * 3
    assert [spec.window_of(layer) for layer in range(3)] == [64, 64, 64]
    assert not any(spec.causal_in_block(layer) for layer in range(3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_theta": 1e4}, "names two rope thetas"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope .*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope .*linear"),
        ({"partial_rotary_factor": 0.25}, "partial factor 0.25"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"head_dim": None}, "head_dim=None"),
        ({"hidden_size": "big"}, "hidden_size='big'"),
    ],
)
def test_a_setting_that_would_be_computed_differently_is_refused(folder, changes, reason):
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=reason):
        load_drafter(folder)


@pytest.mark.parametrize("key", ["output_multiplier", "final_logit_softcapping", "projector_type"])
def test_a_nested_setting_of_another_model_is_refused(folder, key):
    nested = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, dflash_config={**nested, key: "domino" if key == "projector_type" else 30.0})
    with pytest.raises(CheckpointError, match=key):
        load_drafter(folder)


def test_taps_are_never_guessed(folder):
    nested = {"mask_token_id": 96, "block_size": 4, "num_target_layers": 6}
    edit(folder, dflash_config=nested)
    with pytest.raises(CheckpointError, match="target_layer_ids=None"):
        load_drafter(folder)


def test_a_checkpoint_with_a_missing_and_an_extra_tensor_names_both(folder):
    rename(folder, {"layers.2.mlp.up_proj.weight": "layers.2.mlp.upward.weight"})
    with pytest.raises(CheckpointError) as refusal:
        load_drafter(folder)
    assert "missing: layers.2.mlp.up_proj.weight" in str(refusal.value)
    assert "unused: layers.2.mlp.upward.weight" in str(refusal.value)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc.weight \(32, 32\) instead of \(32, 64\)"):
        load_drafter(folder)


def test_an_index_cannot_reach_out_of_its_folder(folder):
    save_file({"fc.weight": torch.zeros(1)}, folder.parent / "outside.safetensors")
    index = {"weight_map": {"fc.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain name"):
        load_drafter(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_drafter(folder)


def test_a_pickle_in_place_of_weights_is_never_executed(folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(folder)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("text", "reason"), [("{", "cannot be read"), ("[]", "holds list")])
def test_a_broken_configuration_is_named(folder, text, reason):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        load_drafter(folder)


def test_a_folder_that_is_no_drafter_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_drafter(tmp_path)


def test_a_drafter_for_another_target_is_refused_with_every_difference():
    target = random_target()
    refuse_misfit(fitting_spec(target), target)

    other = fitting_spec(target, hidden_size=48, vocab_size=12, num_target_layers=8, mask_token_id=11)
    with pytest.raises(CheckpointError) as refusal:
        refuse_misfit(other, target)

    for difference in (
        "hidden size 48 against 32",
        "rows 12 against 11",
        "layers 8 against 6",
        "mask token 11",
    ):
        assert difference in str(refusal.value)
