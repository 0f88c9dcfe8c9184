"""What can be known without the target's weights is refused before they are read: for a large one that is minutes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.cli import app, parse_run
from draftline.commands import evaluate_drafter, export_run, generate_text
from draftline.config import TargetConfig
from draftline.console import Screen
from draftline.data.commands import prepare_store
from draftline.data.options import PrepareOptions
from draftline.data.store import StoreWriter
from draftline.demo import run_demo
from draftline.embedded import embedded_path
from draftline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskFullError,
    DraftlineError,
    OccupiedError,
)
from draftline.options import GenerateOptions, MeasureOptions
from draftline.run import train
from draftline.serving.export import export_drafter
from draftline.serving.importing import load_drafter
from draftline.target.load import load_target, sketch_target
from tests.oracles.tiny import random_drafter, tiny_spec
from tests.target_families import save_target
from tests.test_cli import SETTINGS, changed

QUIET = Screen(quiet=True)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the target's weights fails the test."""

    def read(*_: object) -> None:
        pytest.fail("the target's weights were read")

    monkeypatch.setattr("draftline.setup.load_target", read)
    monkeypatch.setattr("draftline.commands.load_target", read)


def refusal(flags: list[str], output: Path) -> DraftlineError:
    with pytest.raises(DraftlineError) as refused:
        train(parse_run([*flags, f"--output={output}"]), Screen(quiet=True))
    result = json.loads((output / "result.json").read_text())
    assert result["exit_code"] == refused.value.exit_code
    return refused.value


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.eval-path=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--data.eval-path=gsm9k"], "gsm8k"),
        (["--evaluation.thinking=on"], "no switch"),
        (["--drafter.num-heads=3", "--drafter.num-kv-heads=2"], "num_heads=3 is not a multiple"),
        (["--drafter.head-dim=7"], "head_dim=7 is odd"),
        (["--drafter.sliding-window=8"], "drafter.sliding_window=8 has no effect"),
        (["--drafter.init-from=/nowhere"], "/nowhere is neither a drafter"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_without_weights(flags, words, tmp_path):
    given = list(SETTINGS)
    for flag in flags:
        name = flag.partition("=")[0]
        given = [one for one in given if not one.startswith(name)]
    assert words in str(refusal([*given, "--optim.steps=1", *flags], tmp_path / "run"))


@pytest.mark.usefixtures("no_weights")
def test_an_empty_file_of_prompts_is_refused_without_weights(tmp_path):
    (tmp_path / "held-out.jsonl").write_text("")
    flags = [*changed(f"--data.eval-path={tmp_path}/held-out.jsonl"), "--optim.steps=1"]
    assert "held-out.jsonl" in str(refusal(flags, tmp_path / "run"))


@pytest.mark.usefixtures("no_weights")
def test_a_set_that_needs_a_missing_package_is_refused_without_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    flags = [*changed("--data.eval-path=gsm8k"), "--optim.steps=1"]
    assert "pip install datasets" in str(refusal(flags, tmp_path / "run"))


@pytest.mark.usefixtures("no_weights")
def test_a_target_without_a_chat_template_is_refused_without_weights(tmp_path):
    target = Path(shutil.copytree(embedded_path("tiny"), tmp_path / "target"))
    (target / "chat_template.jinja").unlink(missing_ok=True)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    flags = [*changed(f"--target.path={target}"), "--optim.steps=1"]
    assert "chat template" in str(refusal(flags, tmp_path / "run"))


@pytest.mark.usefixtures("no_weights")
def test_a_target_whose_weights_are_missing_is_refused_before_its_data_are_read(tmp_path):
    target = Path(shutil.copytree(embedded_path("tiny"), tmp_path / "target"))
    (target / "model.safetensors").unlink()
    (tmp_path / "empty.jsonl").touch()
    others = [flag for flag in changed(f"--target.path={target}") if not flag.startswith("--data.eval-path")]
    flags = [*others, f"--data.eval-path={tmp_path / 'empty.jsonl'}", "--optim.steps=1"]
    assert "model.safetensors is missing" in str(refusal(flags, tmp_path / "run"))


@pytest.mark.usefixtures("no_weights")
def test_a_start_of_another_shape_is_refused_without_weights(tmp_path):
    drafter = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "other")
    flags = [*SETTINGS, "--optim.steps=1", f"--drafter.init-from={tmp_path / 'other'}"]
    assert "block_size is 4 there and 8 here" in str(refusal(flags, tmp_path / "run"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [*changed("--data.eval-path=builtin:demo"), "--optim.steps=1"]
    return train(
        parse_run([*flags, f"--output={tmp_path_factory.mktemp('early') / 'run'}"]), Screen(quiet=True)
    ).folder


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--optim.lr=0.5", "config.optim.lr was 0.0006 and is now 0.5"),
        ("--drafter.num-layers=2", "config.drafter.num_layers was 1 and is now 2"),
        ("--data.max-length=128", "has changed since"),
        ("--data.path=builtin:all", "has changed since"),
    ],
)
def test_a_folder_of_another_run_is_refused_without_weights_and_nothing_in_it_changes(
    flag, words, trained, monkeypatch
):
    monkeypatch.setattr(StoreWriter, "__enter__", lambda *_: pytest.fail("a store was written"))
    before = contents(trained)
    with pytest.raises(OccupiedError, match=words) as refused:
        train(parse_run([*changed(flag), "--optim.steps=1", f"--output={trained}"]), QUIET)
    assert refused.value.exit_code == 2
    assert contents(trained) == before


@pytest.mark.usefixtures("no_weights")
def test_a_run_on_another_store_is_refused_without_weights_and_nothing_in_its_folder_changes(
    trained, tmp_path
):
    target, options = TargetConfig(path="builtin:tiny"), PrepareOptions(max_length=128)
    prepare_store("builtin:demo", tmp_path / "store", target, options, QUIET, overwrite=False)
    before = contents(trained)
    flags = [*changed(f"--data.path={tmp_path / 'store'}"), "--optim.steps=1", f"--output={trained}"]
    with pytest.raises(OccupiedError, match=r"data\.key was"):
        train(parse_run(flags), QUIET)
    assert contents(trained) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("target", ["tiny", "smollm2"])
def test_a_demo_in_the_folder_of_another_run_is_refused_before_it_writes_or_fetches_anything(
    target, trained, monkeypatch
):
    monkeypatch.setattr("draftline.demo.with_own_answers", lambda *_: pytest.fail("a target was fetched"))
    before = contents(trained.parent)
    with pytest.raises(OccupiedError, match=r"step-000001 belongs to a run with other settings"):
        run_demo(target, trained, (), json_output=False)
    assert contents(trained.parent) == before


@pytest.mark.usefixtures("no_weights")
def test_a_disk_without_room_for_checkpoints_is_refused_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointFileSystem, "free_bytes", lambda *_: 100_000)
    error = refusal([*SETTINGS, "--optim.steps=1"], tmp_path / "run")
    assert isinstance(error, DiskFullError)
    assert error.exit_code == 8


@pytest.mark.usefixtures("no_weights")
def test_held_out_prompts_beyond_the_targets_context_are_refused_without_weights(tmp_path):
    flags = [*changed("--evaluation.max-new-tokens=1000000"), "--optim.steps=1"]
    assert "longer than the target's context" in str(refusal(flags, tmp_path / "run"))


def use(command: str, drafter: Path, prompts: str, out: Path) -> None:
    target = TargetConfig(path="builtin:tiny")
    if command == "evaluate":
        evaluate_drafter(drafter, [prompts], target, MeasureOptions(), QUIET)
    elif command == "generate":
        generate_text(drafter, "Hello", target, GenerateOptions(), show=False)
    else:
        export_run(drafter, out, [prompts], target, "z-lab", None, MeasureOptions(), QUIET)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["evaluate", "generate", "export"])
def test_a_drafter_or_prompts_that_cannot_be_used_are_refused_without_weights(command, tmp_path):
    other = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    export_drafter(other.spec, other.state_dict(), tmp_path / "other")
    with pytest.raises(CheckpointError, match="made for another target"):
        use(command, tmp_path / "other", "builtin:demo", tmp_path / "out")
    with pytest.raises(ConfigError, match="neither a drafter"):
        use(command, tmp_path / "nowhere", "builtin:demo", tmp_path / "out")
    if command != "generate":
        with pytest.raises(DataError, match="nowhere"):
            use(command, tmp_path / "other", "/nowhere.jsonl", tmp_path / "out")


BEYOND = r"prompt {} of {} .*has \d+ tokens; .* longer than the target's context of 2048 tokens"
LONG = "word " * 3000


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_prompts_beyond_the_targets_context_are_counted_and_refused_without_weights(
    command, trained, tmp_path
):
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", LONG, "Hi", LONG)))
    with pytest.raises(DataError, match=BEYOND.format(2, 4) + ".*; 2 of the prompts are too long"):
        use(command, trained, str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
def test_a_prompt_to_answer_beyond_the_targets_context_is_refused_without_weights(trained):
    with pytest.raises(DataError, match=r"prompt 1 of 1 has .*target's context of 2048 tokens"):
        generate_text(trained, LONG, TargetConfig(path="builtin:tiny"), GenerateOptions(), show=False)


@pytest.mark.usefixtures("no_weights")
def test_answers_too_long_for_the_targets_context_are_a_setting_to_change(trained, tmp_path):
    target, limit = TargetConfig(path="builtin:tiny"), 5000
    with pytest.raises(
        ConfigError, match=r"with an answer of 5000 \(max_new_tokens\) .* lower max_new_tokens"
    ):
        generate_text(trained, "Hi", target, GenerateOptions(max_new_tokens=limit), show=False)
    with pytest.raises(ConfigError, match="lower max_new_tokens"):
        evaluate_drafter(trained, ["builtin:demo"], target, MeasureOptions(max_new_tokens=limit), QUIET)
    flags = [*changed(f"--evaluation.max-new-tokens={limit}"), "--optim.steps=1"]
    assert isinstance(refusal(flags, tmp_path / "run"), ConfigError)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompts=3"], "--num-prompts is for measuring on prompts, .*; name some, or leave it out"),
        (
            ["--compare=5", "--thinking=both", "--caches=fixed"],
            "--thinking, --compare, --caches are for measuring on prompts, .*; name some, or leave them out",
        ),
        (["--max-new-tokens=9"], "--max-new-tokens is"),
        (
            ["--dtype=float32"],
            "--dtype is for what is computed on a target; name it by --target, or leave it out",
        ),
    ],
)
def test_an_export_refuses_flags_that_would_have_no_effect_before_it_reads_anything(flags, words, tmp_path):
    target = [] if "--dtype=float32" in flags else ["--target=/nowhere"]
    with pytest.raises(ConfigError, match=words):
        app(
            ["export", "/nowhere", str(tmp_path / "out"), *target, *flags],
            exit_on_error=False, print_error=False, result_action="return_value",
        )  # fmt: skip


@pytest.mark.usefixtures("no_weights")
def test_an_export_over_another_drafter_is_refused_without_weights(trained, tmp_path):
    drafter = random_drafter(tiny_spec(), dtype=torch.bfloat16)
    export_drafter(drafter.spec, drafter.state_dict(), tmp_path / "out")
    target = TargetConfig(path="builtin:tiny")
    with pytest.raises(ConfigError, match=r"out holds a drafter of another shape .*--overwrite"):
        export_run(trained, tmp_path / "out", [], target, "z-lab", None, MeasureOptions(), QUIET)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_embedding_scale": 2.0}, "a scaled input"),
        ({"is_causal": True}, "full layers that are causal"),
    ],
)
def test_a_drafter_that_the_speculators_format_cannot_express_is_refused_without_weights(
    changes, words, trained, tmp_path
):
    spec, drafter = load_drafter(trained / "drafter")
    other = export_drafter(spec.model_copy(update=changes), drafter.state_dict(), tmp_path / "other")
    target = TargetConfig(path="builtin:tiny")
    with pytest.raises(ConfigError, match=f"no key for {words}"):
        export_run(
            other, tmp_path / "out", ["builtin:demo"], target, "speculators", None, MeasureOptions(), QUIET
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
def test_an_export_to_where_nothing_can_be_written_is_refused_without_weights(trained):
    target = TargetConfig(path="builtin:tiny")
    with pytest.raises(
        ConfigError, match=r"/proc/out cannot be written: .*; nothing was exported\. Name another"
    ):
        export_run(trained, Path("/proc/out"), [], target, "z-lab", None, MeasureOptions(), QUIET)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_sketch_of_a_target_has_the_shapes_and_the_scale_of_its_weights(family, tmp_path):
    config = TargetConfig(path=str(save_target(tmp_path / family, family)))
    sketch, target = sketch_target(config), load_target(config, torch.device("cpu"))
    assert sketch.head.is_meta
    assert sketch.head.shape == target.head.shape
    assert sketch.embedding_scale == target.embedding_scale
