"""What can be wrong with a target is said in one sentence before any device work."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from draftline.config import TargetConfig
from draftline.errors import CheckpointError, ConfigError
from draftline.target.load import (
    load_target,
    load_tokenizer,
    read_target_config,
    require_weights,
    resolve_dtype,
    sketch_target,
    tables_of,
    wrap_target,
)
from draftline.target.notices import say_missing_kernels, without_load_report
from tests.target_families import HIDDEN, NUM_LAYERS, VOCAB, model, save_target, tokenizer

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "target"))


def load(folder: Path):
    return load_target(TargetConfig(path=str(folder)), CPU)


def shard(folder: Path, index: object | None = None) -> None:
    """Split the weights into two files, with an index (or another text in its place)."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    home = {key: names[order % 2] for order, key in enumerate(weights)}
    for name in names:
        part = {key: weights[key] for key, file in home.items() if file == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    text = index if isinstance(index, str) else json.dumps(index or {"metadata": {}, "weight_map": home})
    (folder / INDEX).write_text(text)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_loaded_target_is_frozen_and_its_tied_head_is_the_embedding_itself(folder: Path):
    assert not any("lm_head" in key for key in load_file(folder / WEIGHTS))
    target = load(folder)
    assert target.head.data_ptr() == target.embedding.data_ptr()
    assert torch.equal(target.head, tables_of(model("qwen3"))[0])
    assert target.head.shape == (VOCAB, HIDDEN)
    assert target.embedding_scale == 1.0
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_shards_load_like_one_file(folder: Path):
    whole = load(folder).model.state_dict()
    shard(folder)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(folder).model.state_dict().items())


def load_elsewhere(folder: Path) -> str:
    """What another process shows that loads a target; transformers' log cannot be caught in this one."""
    # as the command does: before transformers, whose imports would say more
    code = (
        "from draftline.quiet import hold_back; hold_back(); "
        "import sys; from pathlib import Path; from tests.test_target_load import load; "
        "load(Path(sys.argv[1]))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1], env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip
    return shown.stdout + shown.stderr


def test_weights_that_are_not_used_are_named_in_one_line_of_our_own(folder: Path):
    weights = load_file(folder / WEIGHTS)
    stray = {f"model.layers.{NUM_LAYERS}.stray{i}": torch.ones(2) for i in range(4)}
    save_file(weights | stray, folder / WEIGHTS, metadata={"format": "pt"})
    first = f"model.layers.{NUM_LAYERS}.stray"
    assert load_elsewhere(folder) == (
        f"target '{folder}': 4 weights of its files are not used ({first}0, {first}1, {first}2, ...); if you know of "
        "no reason, its config.json belongs to another checkpoint\n"
    )


def test_missing_weights_are_reported_by_our_error_alone(folder: Path):
    weights = load_file(folder / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    shown = load_elsewhere(folder)
    assert "CheckpointError: target" in shown
    assert "lacks 1 weights that its config.json asks for" in shown
    assert "LOAD REPORT" not in shown


@pytest.mark.parametrize(
    ("logger", "text", "device", "shown"),
    [
        (
            "integrations.hub_kernels",
            "`f` is falling back to its reference PyTorch implementation",
            "cpu",
            False,
        ),
        (
            "integrations.hub_kernels",
            "`f` is falling back to its reference PyTorch implementation",
            "cuda",
            True,
        ),
        ("integrations.hub_kernels", "another warning", "cpu", True),
        ("modeling_utils", "Model LOAD REPORT MISSING", "cpu", False),
        ("modeling_utils", "Model LOAD REPORT CONVERSION", "cpu", True),
        ("modeling_utils", "another warning", "cpu", True),
    ],
)
def test_only_the_notices_of_transformers_that_help_nobody_are_held_back(logger, text, device, shown):
    record = logging.LogRecord("transformers", logging.WARNING, __file__, 1, text, (), None)
    say_missing_kernels(torch.device(device))
    with without_load_report():
        assert bool(logging.getLogger(f"transformers.{logger}").filter(record)) == shown
    say_missing_kernels(CPU)


def test_gemmas_embedding_is_taken_raw_with_its_scale():
    target = wrap_target("gemma", model("gemma3"), tokenizer())
    ids = torch.tensor([[3, 5]])
    embedded = model("gemma3").get_input_embeddings()(ids)
    torch.testing.assert_close(target.embedding[ids] * target.embedding_scale, embedded)
    assert target.embedding_scale == pytest.approx(HIDDEN**0.5)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "nothing", "a/b/c"])
def test_a_target_that_is_not_there_is_named(name: str):
    with pytest.raises(ConfigError, match="is not a folder; give a model folder, a hub name"):
        read_target_config(TargetConfig(path=name))


def test_a_file_is_no_target(folder: Path):
    with pytest.raises(ConfigError, match="is not a folder"):
        read_target_config(TargetConfig(path=str(folder / "config.json")))


def test_a_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_target_config(TargetConfig(path=str(tmp_path)))


def test_an_unknown_builtin_lists_those_that_exist():
    with pytest.raises(
        ConfigError, match="no builtin target 'large'; there are builtin:tiny, builtin:hybrid"
    ):
        read_target_config(TargetConfig(path="builtin:large"))


def test_a_target_that_is_not_causal_is_refused(tmp_path: Path):
    small: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(**small, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\['BertForMaskedLM'\], not a causal decoder-only language model"):
        read_target_config(TargetConfig(path=str(tmp_path)))


def test_an_encoder_and_decoder_target_is_refused(tmp_path: Path):
    small = T5Config(vocab_size=50, d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8)
    T5ForConditionalGeneration(small).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not a causal decoder-only language model"):
        read_target_config(TargetConfig(path=str(tmp_path)))


@pytest.mark.parametrize("text", ["{", '{"hidden_size": 3}', '{"model_type": "no-such-model"}'])
def test_a_config_that_cannot_be_read_is_said_in_one_line(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read: ") as error:
        read_target_config(TargetConfig(path=str(folder)))
    assert "\n" not in str(error.value)


def test_a_target_without_tokenizer_is_refused_instead_of_getting_an_empty_one(folder: Path):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer files; copy tokenizer\.json"):
        load_tokenizer(TargetConfig(path=str(folder)))


def test_a_tokenizer_without_its_main_file_is_refused_with_the_files_name(folder: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: copy .* from the original") as error:
        load_tokenizer(TargetConfig(path=str(folder)))
    assert "tokenizer_config.json" not in str(error.value)
    assert "sentencepiece" in str(error.value), "what transformers would have needed is said whole"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", ["read_target_config", "load_tokenizer"])
@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_cannot_be_reached_is_asked_once_and_said_with_the_way_round(
    offline: bool, read: str, tmp_path: Path
):
    code = (
        f"from draftline.config import TargetConfig; from draftline.target.load import {read}\n"
        "import time; time.sleep = lambda _: None  # between the hub's retries\n"
        f"{read}(TargetConfig(path='owner/name'))"
    )
    unreachable = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "1", **unreachable}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert ("HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached") in last
    assert "hf download owner/name --local-dir FOLDER; then set target.path=FOLDER" in last
    assert done.stderr.count("[Retry 1/") == (0 if offline else 1)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bars_are_for_terminals(terminal: bool, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    enable_progress_bar()
    try:
        load(folder)
        assert is_progress_bar_enabled() is terminal
    finally:
        enable_progress_bar()


def test_a_target_without_weights_is_refused(folder: Path):
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; .*safetensors are needed"):
        load(folder)


def test_a_target_with_a_pickle_only_is_refused_with_what_helps(folder: Path):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin is a pickle, .* never opened; .*safe_seriali"
    ):
        load(folder)


def test_what_needs_no_weights_is_told_of_a_folder_without_them(folder: Path):
    (folder / WEIGHTS).unlink()
    sketch = sketch_target(TargetConfig(path=str(folder)))
    assert sketch.embedding.device.type == "meta"


@pytest.mark.parametrize("kept", [0, 4, 7, 100, -1])
def test_weights_that_are_cut_short_are_found_without_loading_them(folder: Path, kept: int):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is cut short|has \d+ bytes)"):
        require_weights(TargetConfig(path=str(folder)))


def test_a_header_that_is_no_header_is_said_to_be_unreadable(folder: Path):
    whole = (folder / WEIGHTS).read_bytes()
    for damaged in (whole[:8] + b"x" + whole[9:], whole.replace(b"data_offsets", b"data_offsetz", 1)):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="has a header that cannot be read"):
            load(folder)


def test_a_shard_that_is_absent_or_cut_short_is_named(folder: Path):
    shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors has \d+ bytes"):
        load(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", ""])
def test_an_index_cannot_name_a_file_outside_its_folder(folder: Path, name: str):
    shard(folder, {"weight_map": {"x": name}})
    with pytest.raises(CheckpointError, match="names a shard outside"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "\x00"])
def test_an_index_that_is_none_is_refused(folder: Path, text: str):
    shard(folder, text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors"):
        load(folder)


def rewrite(change: Callable[[dict[str, torch.Tensor]], object], folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_weight_that_no_file_holds_is_an_error_not_a_random_number(folder: Path):
    rewrite(lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"), folder)
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .*model\.layers\.2\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_weight_of_another_shape_is_an_error(folder: Path):
    rewrite(lambda weights: weights.update({"model.norm.weight": torch.ones(HIDDEN + 1)}), folder)
    with pytest.raises(CheckpointError, match=r"another shape \(model\.norm\.weight\)"):
        load(folder)


def test_a_config_with_more_layers_than_the_weights_is_an_error(folder: Path):
    change_config(folder, num_hidden_layers=NUM_LAYERS + 1, layer_types=["full_attention"] * (NUM_LAYERS + 1))
    with pytest.raises(CheckpointError, match=r"lacks 11 weights .*model\.layers\.6"):
        load(folder)


def test_an_untied_head_that_no_file_holds_is_an_error(folder: Path):
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(folder)


def test_a_head_with_a_bias_is_refused():
    biased = torch.nn.Linear(HIDDEN, VOCAB, bias=True)

    class Biased(type(model("qwen3"))):
        def get_output_embeddings(self):
            return biased

    own = model("qwen3")
    with pytest.raises(ConfigError, match="has a bias, which drafters cannot share"):
        wrap_target("x", Biased(own.config), tokenizer())


def test_code_that_comes_with_a_target_does_not_run_unasked(folder: Path, tmp_path: Path):
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    change_config(
        folder,
        model_type="no-such-model",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    with pytest.raises(ConfigError, match=r"set target\.trust_remote_code=true and target\.revision"):
        load(folder)
    assert not canary.exists()


def test_the_compute_type_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu():
    cuda = torch.device("cuda", 0)
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", cuda, torch.float16) == torch.float16
    assert resolve_dtype("auto", cuda, None) == torch.bfloat16
    assert resolve_dtype("bfloat16", CPU, torch.float32) == torch.bfloat16
