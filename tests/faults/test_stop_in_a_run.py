"""SIGTERM at any moment of a real run: exit code 75, a checkpoint of the last step, and the same end."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.resilience.faults import Fault
from tests.faults.real_runs import (
    EVERY,
    ROWS_PER_STEP,
    STEPS,
    Trainers,
    assert_same_state,
    metrics_of,
    result_of,
    settings,
)

MOMENTS = {
    "while workers start": ("drafter-1", "start", 0),
    "between checkpoints": ("drafter-0", "step", EVERY + 1),
    "while a checkpoint is written": ("checkpoint", "manifest", 2 * EVERY),
    "in the last step": ("drafter-1", "step", STEPS - 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_run_saves_its_last_step_and_goes_on_from_there(
    tmp_path: Path, store: Path, warm: Trainers, moment: str
) -> None:
    worker, where, at = MOMENTS[moment]
    output, log = tmp_path / "run", tmp_path / "log"
    flags = settings(output, 1, 2, data__path=store)
    assert warm.run(flags, log, Fault(worker=worker, where=where, at=at, kind="terminate")) == 75
    result, done = result_of(output), len(metrics_of(output))
    assert (result["exit_code"], result["step"]) == (75, done)
    newest = Path(result["checkpoint"]).name if result["checkpoint"] else "step-000000"
    assert newest == f"step-{done:06d}"
    assert warm.run(flags, log) == 0
    assert_same_state(output, two_drafters(tmp_path.parent, store, warm))
    assert [line["progress/step"] for line in metrics_of(output)] == list(range(1, STEPS + 1))


def two_drafters(folder: Path, store: Path, warm: Trainers) -> Path:
    """The unbroken run of one target and two drafters, made once."""
    output = folder / "two-drafters"
    if not output.exists():
        assert warm.run(settings(output, 1, 2, data__path=store), folder / "log") == 0
    return output


def test_a_second_signal_ends_the_run_at_once_and_costs_only_steps(
    tmp_path: Path, store: Path, unbroken: Path, warm: Trainers
) -> None:
    flags = settings(tmp_path / "run", data__path=store)
    twice = [Fault(worker="drafter-0", where="step", at=at, kind="terminate") for at in (3, 4)]
    slow = Fault(worker="target-0", where="row", at=4 * ROWS_PER_STEP + 2, kind="sleep", seconds=2)
    code = warm.run(flags, tmp_path / "log", *twice, slow)
    assert code in (1, 75), "the first signal may have ended the run before the second came"
    assert warm.run(flags, tmp_path / "log") == 0
    assert_same_state(tmp_path / "run", unbroken)


def test_sigterm_before_training_says_that_nothing_was_lost(
    tmp_path: Path, store: Path, warm: Trainers
) -> None:
    output = tmp_path / "run"
    terminate = Fault(worker="main", where="prepared", at=0, kind="terminate")
    code = warm.run(settings(output, data__path=store), tmp_path / "log", terminate)
    assert code == 75
    result = result_of(output)
    assert "before training began" in result["cause"]
    assert result["checkpoint"] is None
