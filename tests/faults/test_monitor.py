"""The parent process ends a trainer that cannot speak for itself, and passes everything else through."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.resilience.monitor import VARIABLE, run_monitored, start_heartbeat

MONITOR = """
import sys
from pathlib import Path
from draftline.resilience.monitor import run_monitored
code = run_monitored([sys.executable, "-c", sys.argv[2]], float(sys.argv[1]), Path(sys.argv[3]))
raise SystemExit(code)
"""

TRAINER = """
import ctypes, os, signal, sys, time
from draftline.resilience.monitor import start_heartbeat
signal.alarm(60)  # whatever the monitor does, this process ends
start_heartbeat(os.environ)
def stuck_in_c():
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(mutex)
{body}
"""


def monitored(body: str, folder: Path, timeout_s: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MONITOR, str(timeout_s), TRAINER.format(body=body), folder]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def finished(body: str, folder: Path, timeout_s: float = 60) -> tuple[int, str, dict]:
    """Exit code, stderr and result.json of a monitored run."""
    with monitored(body, folder, timeout_s) as process:
        _, err = process.communicate(timeout=60)
    result = folder / "result.json"
    return process.returncode, err, json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_trainers_own_exit_code_is_passed_on(tmp_path: Path, code: int) -> None:
    assert finished(f"sys.exit({code})", tmp_path) == (code, "", {})


HANG = """
from draftline.resilience.faults import Fault, armed, point
with armed(Fault(worker="target-0", where="forward", at=3, kind="hang")):
    point("target-0", "forward", 3)
"""


def test_a_trainer_that_holds_the_interpreter_lock_is_shown_and_killed(tmp_path: Path) -> None:
    started = time.monotonic()
    code, err, result = finished(HANG, tmp_path, timeout_s=2.5)
    assert time.monotonic() - started < 30
    assert code == 6
    assert "in _hold_the_interpreter_lock" in err, "faulthandler needs no interpreter to show the stack"
    assert "no sign of life for 5 s" in err
    assert result["exit_code"] == 6
    assert "interpreter lock" in result["cause"]


def test_a_trainer_that_works_in_python_for_long_is_left_alone(tmp_path: Path) -> None:
    busy = "end = time.monotonic() + 4\nwhile time.monotonic() < end: sum(range(1000))"
    assert finished(busy, tmp_path, timeout_s=1.5)[0] == 0


def test_a_trainer_killed_from_outside_is_told_with_the_signals_name_and_a_hint(tmp_path: Path) -> None:
    code, err, result = finished("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert code == 1
    assert "killed by SIGKILL (if nobody sent it, the host ran out of memory" in err
    assert result["exit_code"] == 1
    assert "SIGKILL" in result["cause"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_a_trainer_that_has_no_handler_yet_is_a_stop_and_no_kill(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    body = f"signal.signal({number}, signal.SIG_DFL); print('in', flush=True); time.sleep(60)"
    with monitored(body, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.startswith(f"draftline: interrupted by {number.name}; what is finished stays as it is")


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback() -> None:
    interrupted = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "draftline.cli": raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("draftline", run_name="__main__")
"""
    command = [sys.executable, "-c", interrupted]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_whoever_waits_for_a_trainer_is_told_what_a_killed_one_cannot_say() -> None:
    told = list[tuple[int, str, str]]()
    body = "import os; os.kill(os.getpid(), 9)"
    code = run_monitored([sys.executable, "-c", body], 30, failed=lambda *what: told.append(what))
    assert [what[0] for what in told] == [code] == [1]
    assert "killed by SIGKILL" in told[0][2]
    assert run_monitored([sys.executable, "-c", "exit(4)"], 30, failed=lambda *what: told.append(what)) == 4
    assert len(told) == 1, "one that ends by itself has said what there is to say"


def test_a_crash_in_native_code_is_told(tmp_path: Path) -> None:
    code, err, _ = finished("os.kill(os.getpid(), signal.SIGBUS)", tmp_path)
    assert code == 1
    assert "killed by SIGBUS (a crash in native code" in err


STOPS_WHEN_TOLD = """
from draftline.resilience.signals import StopOnSignal
with StopOnSignal() as stop:
    print(os.getpid(), flush=True)
    while not stop.requested: time.sleep(0.01)
    time.sleep(0.3)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_trainer_once_and_its_code_comes_back(tmp_path: Path, number: int) -> None:
    with monitored(STOPS_WHEN_TOLD, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert err.count("finishing this step") == 1


def test_when_the_monitor_is_killed_the_trainer_saves_and_stops(tmp_path: Path) -> None:
    with monitored(STOPS_WHEN_TOLD, tmp_path, timeout_s=1.0) as process:
        assert process.stdout is not None
        trainer = int(process.stdout.readline())
        process.kill()
        _, err = process.communicate(timeout=30)  # returns when the trainer has closed its end, too
    assert "the monitor died; stopping as for SIGTERM" in err
    assert "finishing this step" in err
    assert is_gone(trainer)


def is_gone(pid: int) -> bool:
    """Ended, though whoever adopted it may not have collected its status yet."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def test_a_second_signal_ends_even_a_trainer_whose_interpreter_is_stuck(tmp_path: Path) -> None:
    # deaf from the start, so that the first signal cannot come before it is stuck
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('in', flush=True); stuck_in_c()"
    with monitored(deaf, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 1


def test_children_of_the_trainer_do_not_outlive_it(tmp_path: Path) -> None:
    body = "if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(60)\ntime.sleep(0.5); sys.exit(4)"
    with monitored(body, tmp_path) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        process.communicate(timeout=30)
    assert process.returncode == 4
    assert is_gone(grandchild)


def test_the_monitor_imports_no_torch() -> None:
    code = "import sys, draftline.resilience.monitor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_monitor_no_heartbeat_is_started() -> None:
    start_heartbeat({})


@pytest.mark.parametrize("text", ["", "x", "3", "3:y", "99999:1"])
def test_a_variable_that_no_monitor_set_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        start_heartbeat({VARIABLE: text})


def test_handlers_of_this_process_are_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_monitored([sys.executable, "-c", "pass"], 30) == 0
    assert signal.getsignal(signal.SIGTERM) is before
