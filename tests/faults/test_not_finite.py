"""A loss or gradient that is not finite: nothing is learned from it, the step is kept, and can be computed again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from draftline.cli import replay as replay_command
from draftline.drafter.worker import first_bad_row
from draftline.errors import Blame, CheckpointError, ConfigError, NonFiniteError, blame_of
from draftline.resilience.badstep import read_bad_step
from draftline.resilience.faults import Fault, armed
from draftline.resilience.replay import describe, replay
from tests.faults.real_runs import (
    EVERY,
    ROWS_PER_STEP,
    STEPS,
    assert_same_state,
    final_state,
    metrics_of,
    result_of,
    settings,
    train_here,
)

STEP = 4
ROW = STEP * ROWS_PER_STEP + 3


def fail_at(
    output: Path, store: Path, fault: Fault, targets: int = 1, drafters: int = 1, **changes: str
) -> NonFiniteError:
    with armed(fault), pytest.raises(NonFiniteError) as caught:
        train_here(settings(output, targets, drafters, data__path=store, **changes))
    return caught.value


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run that ended because the hidden states of one row were NaN once."""
    output = tmp_path_factory.mktemp("nan") / "run"
    error = fail_at(output, store, Fault(worker="target-0", where="row", at=ROW, kind="nan"))
    assert blame_of(error) == Blame("drafter-0", ROW)
    return output


def test_the_result_names_cause_worker_step_row_checkpoint_and_the_saved_step(poisoned: Path) -> None:
    result = result_of(poisoned)
    assert result["exit_code"] == 5
    assert f"step {STEP}: the loss of row {ROW} is not finite" in result["cause"]
    assert (result["worker"], result["step"], result["row"]) == ("drafter-0", STEP, ROW)
    assert Path(result["checkpoint"]).name == f"step-{STEP // EVERY * EVERY:06d}"
    assert Path(result["replay"]) == poisoned / "not-finite" / f"step-{STEP:06d}"


def test_the_saved_step_holds_its_rows_and_the_weights_before_it(poisoned: Path, unbroken: Path) -> None:
    saved = read_bad_step(poisoned / "not-finite" / f"step-{STEP:06d}")
    assert [row.index for row in saved.rows] == list(range(STEP * ROWS_PER_STEP, (STEP + 1) * ROWS_PER_STEP))
    state = final_state(poisoned)  # of step 4, after which nothing was learned
    for name, weight in saved.weights.items():
        assert torch.equal(weight, state[f"master.{name}"])


def test_a_fault_that_does_not_come_back_is_told_as_one_of_the_machine(poisoned: Path) -> None:
    outcome = replay(poisoned / "not-finite" / f"step-{STEP:06d}")
    assert outcome.is_finite
    assert len(outcome.rows) == ROWS_PER_STEP
    assert all(math.isfinite(row.loss) and row.loss > 0 for row in outcome.rows)
    assert "suspect the device" in describe(outcome)[0]


def test_a_step_of_a_drafter_that_computes_in_bfloat16_is_replayed_too(tmp_path: Path, store: Path) -> None:
    fault = Fault(worker="target-0", where="row", at=ROW, kind="nan")
    error = fail_at(tmp_path / "run", store, fault, placement__drafter_dtype="bfloat16")
    assert error.saved is not None
    assert {weight.dtype for weight in read_bad_step(error.saved).weights.values()} == {torch.bfloat16}
    assert replay(error.saved).is_finite


def test_the_replayed_losses_are_those_that_the_step_would_have_had(poisoned: Path, unbroken: Path) -> None:
    outcome = replay(poisoned / "not-finite" / f"step-{STEP:06d}")
    expected = next(line["train/loss"] for line in metrics_of(unbroken) if line["progress/step"] == STEP + 1)
    assert sum(row.loss for row in outcome.rows) / len(outcome.rows) == pytest.approx(expected, rel=0.05)


def test_the_same_command_goes_on_to_the_end_of_the_unbroken_run(
    poisoned: Path, store: Path, unbroken: Path
) -> None:
    train_here(settings(poisoned, data__path=store))
    assert_same_state(poisoned, unbroken)
    assert [line["progress/step"] for line in metrics_of(poisoned)] == [
        line["progress/step"] for line in metrics_of(unbroken)
    ]


def test_with_several_drafters_the_one_that_learned_the_bad_row_is_named(tmp_path: Path, store: Path) -> None:
    nan = Fault(worker="target-1", where="row", at=ROW, kind="nan")
    error = fail_at(tmp_path / "run", store, nan, targets=2, drafters=3)
    assert blame_of(error) == Blame(f"drafter-{ROW % 3}", ROW)


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A saved step of a run whose learning rate threw the weights out of range: a fault that comes back."""
    output = tmp_path_factory.mktemp("lr") / "run"
    with pytest.raises(NonFiniteError) as caught:
        train_here(settings(output, data__path=store, optim__lr=1e30))
    assert caught.value.saved is not None
    return caught.value.saved


def test_a_fault_that_lies_in_the_weights_comes_back_and_is_located(exploded: Path) -> None:
    outcome = replay(exploded)
    assert not outcome.is_finite
    assert outcome.weights == (), "they are finite, only far too large"
    for row in outcome.rows:
        assert row.taps == (), "the target is sound"
        assert row.bad_blocks
        assert row.documents
    assert any("blocks have hidden states that are not finite" in line for line in describe(outcome))


def test_the_command_prints_json_and_ends_with_code_5_when_it_comes_back(
    exploded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        replay_command(exploded, json_output=True)
    assert ended.value.code == 5
    shown = json.loads(capsys.readouterr().out)
    assert shown["finite"] is False
    assert len(shown["rows"]) == ROWS_PER_STEP


def test_a_damaged_saved_step_is_refused(exploded: Path, tmp_path: Path) -> None:
    with (exploded / "rows.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(CheckpointError, match="SHA-256"):
        replay(exploded)


def test_an_ordinary_checkpoint_is_no_saved_step(unbroken: Path) -> None:
    with pytest.raises(CheckpointError, match="not-finite"):
        replay(next((unbroken / "checkpoints").glob("step-*")))


def test_whoever_names_something_else_is_told_what_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="run does not exist; saved steps lie in"):
        replay(run)
    run.mkdir()
    with pytest.raises(ConfigError, match="is no saved step, nor a run"):
        replay(run)
    (run / "result.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a file"):
        replay(run / "result.json")
    with pytest.raises(ConfigError, match="run has no saved step"):
        replay(run)
    for step in (3, 12):
        (run / "not-finite" / f"step-{step:06d}").mkdir(parents=True)
    for named in (run, run / "not-finite"):
        with pytest.raises(ConfigError, match=r"has 2: \S+not-finite/step-000003, \S+not-finite/step-000012"):
            replay(named)


def test_a_step_that_cannot_be_saved_leaves_no_folder(tmp_path: Path, store: Path) -> None:
    """Neither for a disk that refuses nor for a value that cannot be written."""
    for kind, where in (("enospc", "file"), ("raise", "manifest")):
        output = tmp_path / kind
        # the checkpoint of no step has this number: only the saved step meets the fault
        flags = settings(output, data__path=store, optim__lr=1e30, checkpoint__every=1000)
        with (
            armed(*(Fault(worker="checkpoint", where=where, at=step, kind=kind) for step in range(STEPS))),
            pytest.raises(NonFiniteError) as caught,
        ):
            train_here(flags)
        assert any("could not be saved" in note for note in caught.value.__notes__)
        assert not (output / "not-finite").exists()


def test_the_bad_row_is_the_first_whose_running_sum_breaks() -> None:
    nan, inf = float("nan"), float("inf")
    assert first_bad_row(torch.tensor([1.0, 2.0, 3.0, 4.0]), range(8, 12)) is None
    assert first_bad_row(torch.tensor([1.0, 2.0, nan, 4.0]), range(8, 12)) == 10
    assert first_bad_row(torch.tensor([1.0, inf, 3.0, nan]), range(8, 12)) == 9
