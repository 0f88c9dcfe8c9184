"""kill -9 of real training runs: a few here, fifty by `python -m tests.faults.kills`.

Many more, of a smaller trainer with the same checkpoints: test_kill_and_resume.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.resilience.faults import Fault
from tests.faults.kills import INSIDE, Killer, kill_many
from tests.faults.real_runs import EVERY, Trainers, assert_same_state, metrics_of, settings


def test_a_run_killed_again_and_again_ends_as_the_unbroken_one(
    tmp_path: Path, store: Path, unbroken: Path, warm: Trainers
) -> None:
    tally = kill_many(Killer(tmp_path, store, unbroken, warm, seed=1), kills=5, inside=2)
    assert tally.kills >= 5
    assert tally.finished_runs >= 1


@pytest.mark.parametrize("where", INSIDE)
def test_a_kill_at_each_point_of_a_checkpoint_s_write_changes_nothing(
    tmp_path: Path, store: Path, unbroken: Path, warm: Trainers, where: str
) -> None:
    flags = settings(tmp_path / "run", data__path=store)
    kill = Fault(worker="checkpoint", where=where, at=2 * EVERY, kind="kill")
    assert warm.run(flags, tmp_path / "log", kill) == -9
    assert warm.run(flags, tmp_path / "log") == 0
    assert_same_state(tmp_path / "run", unbroken)
    assert len(metrics_of(tmp_path / "run")) == len(metrics_of(unbroken))


def test_a_killed_run_in_bfloat16_ends_as_the_unbroken_one(
    tmp_path: Path, store: Path, warm: Trainers
) -> None:
    """Where masters live in two halves: both must come back from the checkpoint to the last bit."""
    flags = {
        name: settings(tmp_path / name, data__path=store, placement__drafter_dtype="bfloat16")
        for name in ("whole", "killed")
    }
    kill = Fault(worker="drafter-0", where="step", at=EVERY + 1, kind="kill")
    assert warm.run(flags["whole"], tmp_path / "log") == 0
    assert warm.run(flags["killed"], tmp_path / "log", kill) == -9
    assert warm.run(flags["killed"], tmp_path / "log") == 0
    assert_same_state(tmp_path / "killed", tmp_path / "whole")


def test_one_row_a_drafter_and_step_survives_a_kill_as_well(
    tmp_path: Path, store: Path, warm: Trainers
) -> None:
    """Its gradients are kept in the type they come in, and its only row is the first and the last of its step."""
    shape = {"data__path": store, "placement__drafter_dtype": "bfloat16", "optim__rows_per_step": 2}
    flags = {name: settings(tmp_path / name, drafters=2, **shape) for name in ("whole", "killed")}
    kill = Fault(worker="drafter-1", where="step", at=EVERY + 1, kind="kill")
    assert warm.run(flags["whole"], tmp_path / "log") == 0
    assert warm.run(flags["killed"], tmp_path / "log", kill) == -9
    assert warm.run(flags["killed"], tmp_path / "log") == 0
    assert_same_state(tmp_path / "killed", tmp_path / "whole")
