"""A thread that raises, of every kind and at every moment of a real run: one cause, soon, and no thread stays.

The pipeline's own threads at start, first, middle and last step, without the run round them:
tests/test_pipeline_failures.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftline.console import Screen
from draftline.resilience.faults import Fault, FaultPlan, InjectedFaultError, armed
from tests.faults.real_runs import EVERY, ROWS_PER_STEP, STEPS, metrics_of, result_of, settings, train_here

WITHIN_S = 5.0
EVALUATE = {
    "data__eval_path": "builtin:demo",
    "evaluation__num_prompts": 2,
    "evaluation__max_new_tokens": 16,
    "evaluation__every": EVERY,
}
SAVED = 2 * EVERY
"""Step whose save takes a while in the tests of failures inside a save."""
SLOW_SAVE = Fault(worker="checkpoint", where="file", at=SAVED, kind="sleep", seconds=2)


class Stopwatch(threading.Thread):
    """Notes when a fault fires."""

    def __init__(self, plan: FaultPlan, fault: Fault) -> None:
        super().__init__(daemon=True)
        self.plan, self.fault, self.fired_at = plan, fault, 0.0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            if self.fault in self.plan.fired:
                self.fired_at = time.monotonic()
                return


@contextmanager
def ends_soon(fault: Fault, *others: Fault) -> Iterator[None]:
    """The block fails with `fault`, within seconds, and leaves no thread."""
    before = set(threading.enumerate())
    with armed(fault, *others) as plan:
        watch = Stopwatch(plan, fault)
        watch.start()
        with pytest.raises(InjectedFaultError):
            yield
        ended_at = time.monotonic()
        watch.done.set()
        watch.join(5)
    assert fault in plan.fired
    assert ended_at - (watch.fired_at or ended_at) < WITHIN_S, (
        "not seen to fire: the run ended sooner than it looks"
    )
    while set(threading.enumerate()) - before and time.monotonic() < ended_at + 2:
        time.sleep(0.01)  # the folder's heartbeat is told to leave, and not waited for
    assert set(threading.enumerate()) == before


def raises(worker: str, where: str, at: int) -> Fault:
    return Fault(worker=worker, where=where, at=at, kind="raise")


def assert_result(output: Path, worker: str, **expected: object) -> None:
    result = result_of(output)
    assert result["exit_code"] == 1
    assert result["error"] == "InjectedFaultError"
    assert result["cause"].startswith("injected at ")
    assert result["worker"].startswith(worker)
    assert {key: result[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("where", "at"),
    [("file", EVERY), ("rename", SAVED), ("file", STEPS)],
    ids=["first", "middle", "last"],
)
def test_the_checkpoint_writer(tmp_path: Path, store: Path, where: str, at: int) -> None:
    fault = raises("checkpoint", where, at)
    with ends_soon(fault):
        train_here(settings(tmp_path, data__path=store))
    newest = tmp_path / "checkpoints" / f"step-{at - EVERY:06d}"
    expected = str(newest) if at > EVERY else None
    assert_result(tmp_path, "checkpoint", row=at * ROWS_PER_STEP, checkpoint=expected)


@pytest.mark.parametrize("at", [EVERY, SAVED, STEPS - EVERY], ids=["first", "middle", "last"])
def test_the_evaluator(tmp_path: Path, store: Path, at: int) -> None:
    with ends_soon(raises("evaluator", "measure", at)):
        train_here(settings(tmp_path, data__path=store, **EVALUATE))
    assert_result(tmp_path, "evaluator")


@pytest.mark.parametrize("worker", ["target-1", "drafter-0"])
def test_a_worker_that_cannot_even_start(tmp_path: Path, store: Path, worker: str) -> None:
    with ends_soon(raises(worker, "start", 0)):
        train_here(settings(tmp_path, 2, 2, data__path=store))
    assert_result(tmp_path, worker, step=0, checkpoint=None)
    assert metrics_of(tmp_path) == []


INSIDE_A_SAVE = {
    "target-0": raises("target-0", "row", (SAVED + 1) * ROWS_PER_STEP),
    "drafter-1": raises("drafter-1", "step", SAVED + 1),
    "loader-": raises("loader", "row", (SAVED + 1) * ROWS_PER_STEP + 1),
    "evaluator": raises("evaluator", "measure", SAVED),
}


@pytest.mark.parametrize("worker", INSIDE_A_SAVE)
def test_a_failure_while_a_checkpoint_is_written_lets_that_checkpoint_be_finished(
    tmp_path: Path, store: Path, worker: str
) -> None:
    with ends_soon(INSIDE_A_SAVE[worker], SLOW_SAVE):
        train_here(settings(tmp_path, 1, 2, data__path=store, **EVALUATE))
    assert_result(tmp_path, worker, checkpoint=str(tmp_path / "checkpoints" / f"step-{SAVED:06d}"))


class ScreenWithClock(Screen):
    """Keeps what was said, and when."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[tuple[float, str]] = []

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))


def test_the_cause_is_on_the_screen_while_a_slow_checkpoint_is_still_being_written(
    tmp_path: Path, store: Path
) -> None:
    fault, screen = INSIDE_A_SAVE["drafter-1"], ScreenWithClock()
    with ends_soon(fault, SLOW_SAVE):
        train_here(settings(tmp_path, 1, 2, data__path=store), screen)
    ended = time.monotonic()
    when, text = screen.said[-1]
    assert (
        "drafter-1 failed: injected at drafter-1.step(5). The run ends when the checkpoint of step 4 is"
        in text
    )
    assert "at the latest (deadlines.write_timeout_s)" in text
    assert ended - when > 1  # the save takes two seconds


def test_a_write_that_hangs_holds_a_failed_run_up_to_its_deadline_and_no_longer(
    tmp_path: Path, store: Path
) -> None:
    hanging = SLOW_SAVE.model_copy(update={"seconds": 20})
    flags = settings(tmp_path, 1, 2, data__path=store, deadlines__write_timeout_s=2)
    with armed(INSIDE_A_SAVE["drafter-1"], hanging) as plan:
        started = time.monotonic()
        with pytest.raises(InjectedFaultError):
            train_here(flags)
        assert time.monotonic() - started < 2 + 2 * WITHIN_S
    assert len(plan.fired) == 2
    assert_result(tmp_path, "drafter-1", checkpoint=str(tmp_path / "checkpoints" / f"step-{EVERY:06d}"))
    assert any("was not written within 2 s" in one for one in result_of(tmp_path)["consequences"])
