"""Named points cost next to nothing and do nothing unless armed; armed ones fire once and are strict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Literal

import pytest
import torch

from draftline.errors import ConfigError
from draftline.resilience import faults
from draftline.resilience.faults import Fault, InjectedFaultError, armed, parse_faults, point
from draftline.resilience.signals import StopOnSignal


def test_nothing_happens_at_a_point_that_is_not_armed() -> None:
    with armed(Fault(worker="drafter-1", where="step", at=10, kind="raise")) as plan:
        point("drafter-1", "step", 9)
        point("drafter-0", "step", 10)
        point("drafter-1", "start", 10)
        assert plan.fired == []


def test_a_fault_fires_once_and_is_recorded() -> None:
    fault = Fault(worker="drafter-1", where="step", at=10, kind="raise")
    with armed(fault) as plan:
        with pytest.raises(InjectedFaultError, match=r"injected at drafter-1\.step\(10\)"):
            point("drafter-1", "step", 10)
        point("drafter-1", "step", 10)
    assert plan.fired == [fault]
    point("drafter-1", "step", 10)


def test_many_threads_at_one_point_share_one_fault() -> None:
    hit: list[int] = []
    barrier = threading.Barrier(8)

    def pass_point(number: int) -> None:
        barrier.wait(5)
        try:
            point("loader", "row", 3)
        except InjectedFaultError:
            hit.append(number)

    with armed(Fault(worker="loader", where="row", at=3, kind="raise")):
        threads = [threading.Thread(target=pass_point, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
    assert len(hit) == 1


def test_nan_fills_the_tensor_of_the_point() -> None:
    taps = torch.ones(3, 4)
    with armed(Fault(worker="target-0", where="taps", at=0, kind="nan")):
        point("target-0", "taps", 0, taps)
    assert taps.isnan().all()


def test_oom_and_enospc_are_the_errors_that_the_real_ones_are() -> None:
    with armed(Fault(worker="w", where="p", at=0, kind="oom")), pytest.raises(torch.OutOfMemoryError):
        point("w", "p", 0)
    with (
        armed(Fault(worker="w", where="p", at=0, kind="enospc")),
        pytest.raises(OSError, match="No space left"),
    ):
        point("w", "p", 0)


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_sleep_and_spin_wait(kind: Literal["sleep", "spin"]) -> None:
    with armed(Fault(worker="w", where="p", at=0, kind=kind, seconds=1)):
        started = time.monotonic()
        point("w", "p", 0, torch.ones(1))
        assert time.monotonic() - started >= 1


def test_a_sleep_ends_with_its_plan_so_that_nobody_wakes_inside_another_one() -> None:
    with armed(Fault(worker="w", where="p", at=0, kind="sleep", seconds=30)) as plan:
        sleeper = threading.Thread(target=point, args=("w", "p", 0))
        sleeper.start()
        while not plan.fired:
            time.sleep(0.01)
    sleeper.join(5)
    assert not sleeper.is_alive()


def test_poison_is_an_assertion_that_fails_on_the_device() -> None:
    with armed(Fault(worker="w", where="p", at=0, kind="poison")), pytest.raises(RuntimeError):
        point("w", "p", 0, torch.ones(1))


def test_terminate_sends_the_signal_that_a_scheduler_sends() -> None:
    with StopOnSignal() as stop, armed(Fault(worker="w", where="p", at=0, kind="terminate")):
        point("w", "p", 0)
        assert stop.requested


def test_a_process_is_armed_by_its_environment() -> None:
    code = (
        "import os; from draftline.resilience import faults; "
        "faults.arm_from_environment(os.environ); faults.point('w', 'p', 2)"
    )
    text = json.dumps([{"worker": "w", "where": "p", "at": 2, "kind": "kill"}])
    environment = os.environ | {faults.VARIABLE: text}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL


def test_without_the_variable_nothing_is_armed() -> None:
    assert faults.arm_from_environment({}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"worker": "w", "where": "p", "at": 0}]',
        '[{"worker": "w", "where": "p", "at": "0", "kind": "raise"}]',
        '[{"worker": "w", "where": "p", "at": -1, "kind": "raise"}]',
        '[{"worker": "w", "where": "p", "at": 0, "kind": "explode"}]',
        '[{"worker": "w", "where": "p", "at": 0, "kind": "raise", "wehre": 1}]',
    ],
)
def test_a_plan_that_is_not_exact_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="DRAFTLINE_FAULTS"):
        parse_faults(text)


def test_a_point_costs_less_than_a_microsecond() -> None:
    started = time.thread_time()
    for step in range(100_000):
        point("drafter-0", "step", step)
    assert (time.thread_time() - started) / 100_000 < 2e-6
