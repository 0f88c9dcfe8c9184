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
