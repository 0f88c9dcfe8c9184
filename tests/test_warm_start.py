"""Warm start: training begins at exactly the weights that were named, and whatever does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.cli import parse_run
from draftline.config import DrafterConfig
from draftline.console import Screen
from draftline.embedded import embedded_path
from draftline.errors import CheckpointError, ConfigError
from draftline.run import train
from draftline.serving.export import export_drafter, export_speculators
from draftline.serving.importing import load_drafter
from draftline.serving.speculators import Verifier
from draftline.serving.warm_start import load_warm_start
from tests.oracles.tiny import random_drafter, tiny_spec
from tests.test_cli import SETTINGS

OUTPUT = Path("nowhere/output")
DRAFTER = random_drafter(tiny_spec(tokenizer_sha256="a" * 64), dtype=torch.bfloat16)


def write(kind: str, folder: Path) -> Path:
    """The drafter in one of the formats that are read."""
    spec, weights = DRAFTER.spec, DRAFTER.state_dict()
    if kind == "speculators":
        return export_speculators(spec, weights, folder, Verifier("owner/model", ("Qwen3ForCausalLM",)))
    export_drafter(spec, weights, folder)
    if kind == "torchspec":
        names = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
        renamed = {
            next(
                (new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name
            ): t
            for name, t in load_file(folder / "model.safetensors").items()
        }
        save_file(renamed, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["z-lab", "torchspec", "speculators"])
def test_every_format_that_is_read_starts_a_run_with_the_same_weights(kind, tmp_path):
    wanted = DrafterConfig(init_from=str(write(kind, tmp_path / "old")))

    start = load_warm_start(wanted, DRAFTER.spec, OUTPUT)

    assert start is not None
    for name, tensor in DRAFTER.state_dict().items():
        assert start.weights[name].dtype == torch.float32
        assert torch.equal(start.weights[name], tensor.float())


def test_the_hash_is_of_the_weights_and_not_of_the_place(tmp_path):
    first = write("z-lab", tmp_path / "old")
    second = write("torchspec", tmp_path / "elsewhere")
    other = random_drafter(DRAFTER.spec, seed=1, dtype=torch.bfloat16)
    third = export_drafter(other.spec, other.state_dict(), tmp_path / "other")

    hashes = [
        start.sha256
        for folder in (first, second, third)
        if (start := load_warm_start(DrafterConfig(init_from=str(folder)), DRAFTER.spec, OUTPUT))
    ]

    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_size", 8, "block_size is 4 there and 8 here (drafter.block_size)"),
        ("target_layer_ids", (2, 4), "target_layer_ids is (1, 3) there and (2, 4) here"),
        ("mask_token_id", 90, "mask_token_id is 96 there and 90 here"),
        ("vocab_size", 200, "vocab_size is 97 there and 200 here"),
        ("num_target_layers", 8, "num_target_layers is 6 there and 8 here"),
        ("rope_theta", 1e4, "rope_theta is 1000000.0 there and 10000.0 here"),
        ("tokenizer_sha256", "b" * 64, "tokenizer_sha256 is 'aaaa"),
        ("is_causal", True, "is_causal is"),
    ],
)
def test_a_drafter_for_something_else_is_refused_with_the_difference(field, value, words, tmp_path):
    wanted = DrafterConfig(init_from=str(write("z-lab", tmp_path / "old")))
    with pytest.raises(ConfigError, match="of another kind") as refusal:
        load_warm_start(wanted, DRAFTER.spec.model_copy(update={field: value}), OUTPUT)
    assert words in str(refusal.value)


def test_all_differences_are_named_at_once(tmp_path):
    wanted = DrafterConfig(init_from=str(write("z-lab", tmp_path / "old")))
    other = DRAFTER.spec.model_copy(update={"block_size": 8, "head_dim": 8, "num_layers": 2})
    with pytest.raises(ConfigError) as refusal:
        load_warm_start(wanted, other, OUTPUT)
    assert all(name in str(refusal.value) for name in ("block_size", "head_dim", "num_layers"))


def test_another_number_of_layers_is_one_difference_and_not_one_for_each_setting_of_a_layer(tmp_path):
    wanted = DrafterConfig(init_from=str(write("z-lab", tmp_path / "old")))
    other = DRAFTER.spec.model_copy(update={"num_layers": 2, "layer_types": DRAFTER.spec.layer_types[:2]})
    with pytest.raises(ConfigError) as refusal:
        load_warm_start(wanted, other, OUTPUT)
    assert str(refusal.value).count(" there and ") == 1
    assert "num_layers is 3 there and 2 here" in str(refusal.value)


def test_settings_of_layers_are_shown_as_they_are_compared(tmp_path):
    wanted = DrafterConfig(init_from=str(write("z-lab", tmp_path / "old")))
    sliding = ("sliding_attention", "full_attention", "full_attention")
    other = DRAFTER.spec.model_copy(update={"layer_types": sliding, "sliding_window": 6})
    with pytest.raises(
        ConfigError, match=r"sliding_window is \[None, None, None\] there and \[6, None, None\] here"
    ):
        load_warm_start(wanted, other, OUTPUT)


def test_a_drafter_that_records_no_tokenizer_is_taken(tmp_path):
    folder = write("z-lab", tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    del config["draftline"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_warm_start(DrafterConfig(init_from=str(folder)), DRAFTER.spec, OUTPUT) is not None


def test_a_missing_and_an_unused_tensor_are_both_named(tmp_path):
    folder = write("z-lab", tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.scale"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight; unused: norm\.scale"):
        load_warm_start(DrafterConfig(init_from=str(folder)), DRAFTER.spec, OUTPUT)


def test_a_targets_folder_is_said_to_be_one_before_its_weights_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "draftline.serving.importing._read_tensors", lambda _: pytest.fail("weights were read")
    )
    target = embedded_path("tiny")
    words = (
        r"tiny/config\.json is a \['Qwen3ForCausalLM'\]: the folder of a language model, such as a target, and no "
        r"drafter's; name an exported drafter, a checkpoint or a run folder"
    )
    with pytest.raises(CheckpointError, match=words):
        load_warm_start(DrafterConfig(init_from=str(target)), DRAFTER.spec, OUTPUT)


def test_weights_that_are_not_finite_start_nothing(tmp_path):
    folder = write("z-lab", tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight holds a value that is not finite"):
        load_warm_start(DrafterConfig(init_from=str(folder)), DRAFTER.spec, OUTPUT)


def test_a_run_cannot_start_from_its_own_output(tmp_path):
    folder = write("z-lab", tmp_path / "run" / "drafter")
    with pytest.raises(ConfigError, match="lies in this run's own output"):
        load_warm_start(DrafterConfig(init_from=str(folder)), DRAFTER.spec, tmp_path / "run")


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a drafter, a checkpoint nor a run folder"):
        load_warm_start(DrafterConfig(init_from=str(tmp_path)), DRAFTER.spec, OUTPUT)


def run(folder: Path, *flags: str):
    """Train on the builtin target for a moment."""
    return train(parse_run([*SETTINGS, f"--output={folder}", *flags]), Screen(quiet=True))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("warm") / "old", "--optim.steps=4", "--optim.lr=3e-3").folder


def test_a_warm_run_starts_where_the_old_one_ended_and_moves_from_there(old: Path, tmp_path: Path):
    warm = run(tmp_path / "new", "--optim.steps=1", "--optim.lr=1e-12", f"--drafter.init-from={old}")
    cold = run(tmp_path / "cold", "--optim.steps=1", "--optim.lr=1e-12")

    _, before = load_drafter(old / "drafter")
    _, after = load_drafter(warm.drafter)
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    assert not torch.equal(load_drafter(cold.drafter)[1].fc.weight, before.fc.weight)
    assert warm.before is not None
    assert warm.after is not None
    assert warm.before.overall == warm.after.overall


def test_a_resumed_run_needs_the_same_initial_weights_wherever_they_lie(old: Path, tmp_path: Path):
    moved, flags = tmp_path / "moved", ("--optim.steps=1", "--optim.lr=1e-3")
    run(tmp_path / "new", *flags, f"--drafter.init-from={old}")
    shutil.copytree(old / "drafter", moved)

    run(tmp_path / "new", *flags, f"--drafter.init-from={moved}")  # resumes: nothing left to do

    with pytest.raises(ConfigError, match=r"config\.initial_weights was '[0-9a-f]+' and is now None"):
        run(tmp_path / "new", *flags)
