"""What a model card calls the target: a hub name that somebody told, never a path of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftline.cli import app
from draftline.console import Screen
from draftline.embedded import embedded_path
from draftline.errors import CheckpointError
from draftline.run import train
from draftline.serving.base_model import base_model_in, find_base_model, publishable
from draftline.serving.card import measured_in, model_card
from draftline.serving.export import export_drafter, export_speculators
from draftline.serving.speculators import Verifier
from draftline.settings import parse_run
from tests.oracles.tiny import random_drafter, tiny_spec
from tests.test_cli import SETTINGS

NAME = "owner/target"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [flag for flag in SETTINGS if not flag.startswith(("--data.eval-path", "--evaluation"))]
    output = tmp_path_factory.mktemp("base") / "run"
    train(parse_run([*flags, "--optim.steps=1", f"--output={output}"]), Screen(quiet=True))
    return output


def export_here(*arguments: object) -> None:
    words = ["export", *map(str, arguments)]
    app(words, exit_on_error=False, print_error=False, result_action="return_value")


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def name_in_card(folder: Path, name: str = NAME) -> None:
    text = card(folder)
    assert text.startswith("---\n")
    (folder / "README.md").write_text(text.replace("---\n", f"---\nbase_model: {name}\n", 1))


def test_a_card_without_a_known_target_has_no_base_model_and_says_what_its_placeholder_means():
    text = model_card(tiny_spec(), None, "me/drafter")
    assert "base_model" not in text
    assert text.splitlines()[5] == "# DFlash drafter"
    assert "TARGET stands for the model that it was trained for" in text


def test_a_path_of_this_machine_gets_into_no_card(run: Path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    target, out = tmp_path / "my-target", tmp_path / "out"
    shutil.copytree(embedded_path("tiny"), target)

    export_here(run, out, f"--target={target}")

    assert str(target) not in card(out)
    assert base_model_in(out) is None
    said = capsys.readouterr()
    assert (
        f"give --target OWNER/NAME, or put the line base_model: OWNER/NAME into the front matter of {out}/README.md"
        in said.err
    )
    assert str(target) in said.out  # lines that serve it here
    assert "site-packages" not in card(run / "drafter")
    assert str(embedded_path("tiny")) not in card(run / "drafter")
    assert measured_in(str(target), "float32", "cpu", 8).startswith("Measured on my-target in")


def test_a_base_model_that_a_card_names_stays_when_the_same_drafter_is_exported_again(
    run: Path, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    out = tmp_path / "out"
    export_here(run, out)
    name_in_card(out)
    capsys.readouterr()
    for flags in ([], ["--target=builtin:tiny"]):
        export_here(run, out, *flags)
        assert base_model_in(out) == NAME
        said = capsys.readouterr()
        assert "OWNER/NAME" not in said.err
        assert NAME in said.out
    assert f"--model-path {NAME}" in card(out)

    export_here(out, tmp_path / "again")
    assert base_model_in(tmp_path / "again") == NAME


def test_the_base_model_of_another_drafter_is_not_kept(run: Path, tmp_path):
    other = random_drafter(tiny_spec())
    out = export_drafter(
        other.spec, other.state_dict(), tmp_path / "out", lambda _: model_card(other.spec, NAME, "me/it")
    )
    export_here(run, out, "--overwrite")
    assert base_model_in(out) is None


def test_what_a_targets_folder_was_loaded_from_is_not_taken_for_its_name(run: Path, tmp_path):
    """A fine-tuned model's config.json names the model before it: a drafter of the one does not fit the other."""
    target, out = shutil.copytree(embedded_path("tiny"), tmp_path / "fine-tuned"), tmp_path / "out"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "_name_or_path": NAME}))

    export_here(run, out, f"--target={target}")

    assert base_model_in(out) is None
    assert NAME not in card(out)


def test_a_checkpoint_names_the_target_that_its_run_named(run: Path, tmp_path):
    source = shutil.copytree(run, tmp_path / "run")
    name_in_card(source / "drafter")
    export_here(source / "checkpoints" / "step-000001", tmp_path / "out")
    assert base_model_in(tmp_path / "out") == NAME


def test_a_hub_name_that_is_given_stands_above_the_one_in_a_card(tmp_path):
    (tmp_path / "README.md").write_text(model_card(tiny_spec(), "other/model", "me/it"))
    assert find_base_model(NAME, [tmp_path]) == NAME
    assert find_base_model(None, [tmp_path]) == "other/model"


@pytest.mark.parametrize(
    ("front", "named"),
    [
        (f"base_model: {NAME}", NAME),
        (f"base_model:\n- {NAME}", NAME),
        ("base_model: TARGET", None),
        ("base_model: ./my-target", None),
        ("base_model: [", None),
        ("base_model: []", None),
    ],
)
def test_only_a_hub_name_in_a_card_is_a_base_model(front: str, named: str | None, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\n# A card\n")
    assert base_model_in(tmp_path) == named


def test_a_target_is_called_by_its_hub_or_builtin_name_or_by_its_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    assert publishable(NAME) == NAME
    assert publishable("builtin:tiny") == "builtin:tiny"
    assert publishable(str(tmp_path / "mine")) == "mine"


def test_a_drafter_whose_format_does_not_tell_the_target_asks_for_it_by_its_flag(tmp_path):
    drafter = random_drafter(tiny_spec())
    verifier = Verifier(NAME, ("Qwen3ForCausalLM",))
    export_speculators(drafter.spec, drafter.state_dict(), tmp_path / "sp", verifier)
    with pytest.raises(
        CheckpointError, match=r"does not tell how many layers the target has.*; name it: --target"
    ):
        export_here(tmp_path / "sp", tmp_path / "back")
