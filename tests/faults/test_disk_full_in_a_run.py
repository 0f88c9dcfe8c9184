"""A real disk of 8 MiB that somebody else fills, at each stage of a real run: exit code 8, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.console import Bar, Screen
from draftline.errors import DiskFullError
from draftline.resilience.faults import Fault, armed
from tests.faults.real_runs import (
    EVERY,
    STEPS,
    assert_same_state,
    metrics_of,
    result_of,
    settings,
    train_here,
)
from tests.faults.test_disk_full import fill, small_disk

__all__ = ["small_disk"]  # a fixture


class FillingBar(Bar):
    """Calls back when a step is shown."""

    on_step: Callable[[int], None]

    def update(self, done: int, detail: str) -> None:
        super().update(done, detail)
        self.on_step(done)


class FillingScreen(Screen):
    """Fills the disk when the run says, or has done, a certain thing."""

    def __init__(self, disk: Path, moment: str) -> None:
        super().__init__(quiet=True)
        self._disk, self._moment = disk, moment

    def say(self, text: str) -> None:
        self._happened(text)
        super().say(text)

    def progress(self, what: str, total: int, done: int = 0) -> Bar:
        bar = FillingBar(self.console, what, total, done)
        bar.on_step = lambda step: self._happened(f"step {step}/{total}")
        return bar

    def _happened(self, what: str) -> None:
        if what.startswith(self._moment):
            fill(self._disk / "filler")


STAGES = {
    "before the run": "",
    "before the first step": "placement",
    "at the first step": "step 1/",
    "between two checkpoints": f"step {EVERY + 1}/",
    "before the last checkpoint": f"step {STEPS - 1}/",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_is_full_ends_the_run_and_the_same_command_goes_on(
    small_disk: Path, store: Path, unbroken: Path, stage: str
) -> None:
    output, flags = small_disk / "run", settings(small_disk / "run", data__path=store)
    if not STAGES[stage]:
        fill(small_disk / "filler")
    with pytest.raises(DiskFullError) as caught:
        train_here(flags, FillingScreen(small_disk, STAGES[stage] or "never"))
    assert caught.value.exit_code == 8
    assert "ull" in str(caught.value) or "free" in str(caught.value)
    assert not list(output.glob("checkpoints/.tmp-*"))
    (small_disk / "filler").unlink()
    train_here(flags)
    assert_same_state(output, unbroken)
    assert result_of(output)["exit_code"] == 0
    assert [line["progress/step"] for line in metrics_of(output)] == list(range(1, STEPS + 1))


def test_a_disk_that_is_full_when_the_drafter_is_exported_costs_only_the_export(
    small_disk: Path, store: Path, unbroken: Path
) -> None:
    output = small_disk / "run"
    evaluate = {
        "data__eval_path": "builtin:demo",
        "evaluation__num_prompts": 2,
        "evaluation__max_new_tokens": 16,
    }
    flags = settings(output, data__path=store, **evaluate)
    with pytest.raises(DiskFullError):
        train_here(flags, FillingScreen(small_disk, f"after {STEPS} steps"))
    (small_disk / "filler").unlink()
    assert not (output / "drafter").exists()
    train_here(flags)
    assert_same_state(output, unbroken)


def test_an_unprepared_file_on_a_full_disk_is_told_before_training(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    fill(small_disk / "filler", leave=32768)
    with pytest.raises(DiskFullError):
        train_here(settings(small_disk / "run"))
    assert not (small_disk / "run" / "checkpoints").exists()
    (small_disk / "filler").unlink()
    train_here(settings(small_disk / "run", optim__steps=1))


def full(where: str, at: int) -> Fault:
    return Fault(worker="checkpoint", where=where, at=at, kind="enospc")


def test_a_checkpoint_without_room_ends_the_run_unless_it_was_told_to_continue(
    tmp_path: Path, store: Path
) -> None:
    with armed(full("file", EVERY)), pytest.raises(DiskFullError):
        train_here(settings(tmp_path, data__path=store))
    result = result_of(tmp_path)
    assert (result["exit_code"], result["worker"], result["checkpoint"]) == (8, "checkpoint", None)


def test_a_run_that_was_told_to_continue_counts_what_it_could_not_save(
    tmp_path: Path, store: Path, unbroken: Path
) -> None:
    flags = settings(tmp_path, data__path=store, checkpoint__on_disk_full="continue")
    with armed(full("file", EVERY), full("rename", 2 * EVERY)):
        train_here(flags)
    assert_same_state(tmp_path, unbroken)
    result = result_of(tmp_path)
    assert (result["exit_code"], result["skipped_checkpoints"]) == (0, 2)


def test_a_run_that_was_told_to_continue_resumes_from_what_it_could_save(
    tmp_path: Path, store: Path, unbroken: Path
) -> None:
    flags = settings(tmp_path, data__path=store, checkpoint__on_disk_full="continue")
    ended = Fault(worker="drafter-0", where="step", at=3 * EVERY, kind="oom")
    with armed(full("manifest", 2 * EVERY), ended), pytest.raises(Exception, match="memory"):
        train_here(flags)
    result = result_of(tmp_path)
    assert result["skipped_checkpoints"] == 1
    assert Path(result["checkpoint"]).name in (f"step-{EVERY:06d}", f"step-{3 * EVERY:06d}")
    train_here(flags)
    assert_same_state(tmp_path, unbroken)
