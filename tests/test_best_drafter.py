"""The drafter that a run exports is the one that was accepted best, with its own figures on its card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.cli import parse_run
from draftline.console import Screen
from draftline.run import train
from draftline.trained import Trained
from tests.test_cli import SETTINGS

EVALUATED = ("--evaluation.every=1", "--checkpoint.keep=5", "--optim.warmup-ratio=0.99")
GOOD = ("--optim.steps=40", "--optim.lr=6e-3")


def run(folder: Path, *flags: str) -> Trained:
    return train(parse_run([*SETTINGS, f"--output={folder}", *flags]), Screen(quiet=True))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A drafter that has begun to learn."""
    return run(tmp_path_factory.mktemp("best") / "good", *GOOD)


@pytest.fixture(scope="module")
def spoilt(good: Trained, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose rate climbs until it forgets what it began with."""
    flags = (f"--drafter.init-from={good.drafter}", "--optim.steps=4", "--optim.lr=2e-2")
    return run(tmp_path_factory.mktemp("best") / "spoilt", *flags, *EVALUATED)


def test_a_run_that_gets_worse_exports_its_best_checkpoint(good: Trained, spoilt: Trained):
    assert good.exported_step == good.steps == 40
    assert spoilt.exported_step < spoilt.steps == 4
    best = spoilt.folder / "checkpoints" / f"step-{spoilt.exported_step:06d}" / "model.safetensors"
    assert (spoilt.drafter / "model.safetensors").read_bytes() == best.read_bytes()


def test_the_reported_acceptance_is_that_of_the_exported_drafter(spoilt: Trained):
    lines = [json.loads(line) for line in (spoilt.folder / "metrics.jsonl").read_text().splitlines()]
    taus = {line["eval/step"]: line["eval/tau"] for line in lines if "eval/step" in line}
    assert spoilt.after is not None
    assert spoilt.after.overall.tau == taus[spoilt.exported_step] == max(taus.values())
    assert f"| all | {spoilt.after.overall.tau:.2f} |" in (spoilt.drafter / "README.md").read_text()
    assert max(taus) == spoilt.steps
    assert taus[spoilt.steps] < spoilt.after.overall.tau


def test_the_evaluation_before_training_is_among_the_metrics(spoilt: Trained):
    first = json.loads((spoilt.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert spoilt.before is not None
    assert (first["progress/step"], first["eval/step"]) == (0, 0)
    assert first["eval/tau"] == spoilt.before.overall.tau


def test_a_finished_run_that_is_started_again_measures_the_same_and_writes_it_once(good: Trained):
    metrics = good.folder / "metrics.jsonl"
    written = metrics.read_text()
    assert json.loads(written.splitlines()[-1])["eval/step"] == good.steps

    again = run(good.folder, *GOOD)

    assert again.after is not None
    assert good.after is not None
    assert again.after.overall == good.after.overall
    assert metrics.read_text() == written


def test_evaluations_carry_slices_positions_and_the_gap_to_training(spoilt: Trained):
    lines = [json.loads(line) for line in (spoilt.folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/tau" in line][-1]
    names = {"eval/tau/demo", "eval/tau_macro/demo", "eval/tau/demo/add", "eval/accept_pos/07", "eval/ce"}
    assert names <= set(last)
    trained = [line for line in lines if "train/accept_anchor_mean" in line][-1]
    assert last["eval/tau_train_gap"] == trained["train/accept_anchor_mean"] - last["eval/tau"]
