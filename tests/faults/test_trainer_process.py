"""`draftline train` as a user starts it, in two processes. (Its --json and exit codes: tests/test_cli.py.)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from draftline.resilience import faults
from draftline.resilience.faults import Fault
from tests.faults.real_runs import SOURCE, metrics_of, result_of, settings


def start(flags: list[str], folder: Path, *armed: Fault, stall_s: float = 60) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        faults.VARIABLE: json.dumps([fault.model_dump() for fault in armed]),
    }
    command = [sys.executable, "-m", "draftline", "train", *flags, f"--deadlines.stall-timeout-s={stall_s}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def last_beat(output: Path) -> float:
    """When the trainer wrote its last step."""
    return (output / "metrics.jsonl").stat().st_mtime


def test_a_call_that_holds_the_interpreter_lock_ends_the_run_within_twice_the_timeout(tmp_path: Path) -> None:
    output, hang = tmp_path / "run", Fault(worker="target-0", where="row", at=40, kind="hang")
    with start(settings(output), tmp_path, hang, stall_s=6) as process:
        _, err = process.communicate(timeout=200)
    assert process.returncode == 6, err
    assert time.time() - last_beat(output) < 2 * 6 + 5 + 3
    assert "_hold_the_interpreter_lock" in err, "the stacks, by faulthandler"
    result = result_of(output)
    assert (result["exit_code"], result["error"], result["worker"]) == (6, "StallError", "trainer")
    assert Path(result["checkpoint"]).name in ("step-000002", "step-000004", "step-000006")


def test_a_target_that_hangs_is_named_with_its_row_before_those_who_starve_behind_it(tmp_path: Path) -> None:
    output, sleep = tmp_path / "run", Fault(worker="target-0", where="row", at=40, kind="sleep")
    with start(settings(output), tmp_path, sleep, stall_s=4) as process:
        _, err = process.communicate(timeout=200)
    assert process.returncode == 6, err
    assert "draftline: no progress for 4 s: target-0 in 'forward' of row 40" in err
    assert "Starving behind: drafter-0" in err
    assert "over.wait(fault.seconds)" in err, "the stack of the thread that hangs"
    result = result_of(output)
    assert (result["exit_code"], result["worker"], result["row"]) == (6, "target-0", 40)
    assert "over.wait(fault.seconds)" in result["stacks"]


def test_a_signal_to_the_parent_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with start(settings(output, optim__steps=2000, checkpoint__every=1000), tmp_path) as process:
        deadline = time.monotonic() + 150
        while not (output / "metrics.jsonl").exists() or not metrics_of(output):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 75, err
    assert out == ""
    result = result_of(output)
    assert result["exit_code"] == 75
    assert result["step"] == metrics_of(output)[-1]["progress/step"]
    assert Path(result["checkpoint"]).name == f"step-{result['step']:06d}"
