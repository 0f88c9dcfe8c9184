"""A run that goes on with other numbers of targets and drafters sees the same data and has the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import Interrupted
from draftline.resilience.faults import Fault, armed
from tests.faults.real_runs import EVERY, STEPS, assert_same_state, metrics_of, settings, train_here

ORDER = ("progress/step", "progress/tokens_target", "progress/blocks", "train/blocks", "train/lr")
"""Figures that differ as soon as one row is another one."""
RELATIVE = 1e-6
"""Losses are added in another order; float32 has 6e-8."""


def stop_at(output: Path, store: Path, step: int, targets: int, drafters: int) -> None:
    """Train until a SIGTERM in the middle of `step`."""
    terminate = Fault(worker="drafter-0", where="step", at=step, kind="terminate")
    with armed(terminate), pytest.raises(Interrupted):
        train_here(settings(output, targets, drafters, data__path=store))


@pytest.mark.parametrize(("targets", "drafters"), [(3, 3), (5, 2)])
def test_the_data_and_the_losses_are_those_of_the_unbroken_run(
    tmp_path: Path, store: Path, unbroken: Path, targets: int, drafters: int
) -> None:
    stop_at(tmp_path, store, EVERY, 1, 1)
    train_here(settings(tmp_path, targets, drafters, data__path=store))
    ours, theirs = metrics_of(tmp_path), metrics_of(unbroken)
    assert len(ours) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert {key: one[key] for key in ORDER} == {key: other[key] for key in ORDER}
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=RELATIVE)


def test_two_changes_of_layout_and_back_change_no_row(tmp_path: Path, store: Path, unbroken: Path) -> None:
    stop_at(tmp_path, store, 1, 2, 3)
    stop_at(tmp_path, store, 4, 1, 2)
    train_here(settings(tmp_path, data__path=store))
    for one, other in zip(metrics_of(tmp_path), metrics_of(unbroken), strict=True):
        assert {key: one[key] for key in ORDER} == {key: other[key] for key in ORDER}
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=RELATIVE)


def test_more_targets_change_not_one_bit(tmp_path: Path, store: Path, unbroken: Path) -> None:
    stop_at(tmp_path, store, 3, 1, 1)
    train_here(settings(tmp_path, targets=3, data__path=store))
    assert_same_state(tmp_path, unbroken)
