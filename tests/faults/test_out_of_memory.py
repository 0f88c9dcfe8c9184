"""A device without memory: exit code 7, the worker, and what to lower; never a smaller batch behind one's back."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import OutOfMemoryError
from draftline.resilience.faults import Fault, armed
from tests.faults.real_runs import assert_same_state, result_of, settings, train_here


@pytest.mark.parametrize(
    ("worker", "where", "at", "step"),
    [("drafter-1", "step", 5, 4), ("target-0", "row", 31, 4), ("drafter-0", "start", 0, 0)],
)
def test_a_worker_without_memory_ends_the_run(
    tmp_path: Path, store: Path, worker: str, where: str, at: int, step: int
) -> None:
    fault = Fault(worker=worker, where=where, at=at, kind="oom")
    with armed(fault), pytest.raises(OutOfMemoryError, match=r"rows\.block_budget"):
        train_here(settings(tmp_path, 1, 2, data__path=store))
    result = result_of(tmp_path)
    assert (result["exit_code"], result["worker"]) == (7, worker)
    assert step <= result["step"] <= step + 1, "reports are read one step late"


def test_the_same_command_goes_on_to_the_same_end(tmp_path: Path, store: Path, unbroken: Path) -> None:
    with armed(Fault(worker="drafter-0", where="step", at=5, kind="oom")), pytest.raises(OutOfMemoryError):
        train_here(settings(tmp_path, data__path=store))
    train_here(settings(tmp_path, data__path=store))
    assert_same_state(tmp_path, unbroken)
