"""The first SIGTERM or SIGINT asks, the second ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from draftline.errors import Interrupted
from draftline.resilience.signals import StopOnSignal

WAIT_FOR_SIGNALS = """
import time
from draftline.resilience.signals import StopOnSignal
with StopOnSignal() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("finishing", flush=True)
    time.sleep({save})
raise SystemExit(stop.error(40).exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_sets_the_flag_and_the_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopOnSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before
    error = stop.error(step=40)
    assert isinstance(error, Interrupted)
    assert error.exit_code == 75
    assert str(error) == f"stopped by {number.name} after step 40; run the same command again to go on"


def start(save: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_SIGNALS.format(save=save)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_once_finishes_its_save_and_exits_75(number: signal.Signals) -> None:
    with start(save=0.2) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert out == "finishing\n"
    assert f"draftline: {number.name}: finishing this step, saving, then stopping" in err


def test_a_run_that_is_told_twice_ends_at_once() -> None:
    with start(save=60) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "finishing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "second signal (SIGINT): ending at once" in err


def test_a_run_whose_terminal_is_gone_still_saves_and_exits_75() -> None:
    with start(save=0.1) as process:
        assert process.stderr is not None
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 75


def test_another_thread_may_not_take_the_handlers() -> None:
    caught: list[ValueError] = []

    def try_it() -> None:
        try:
            StopOnSignal().__enter__()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join(5)
    assert len(caught) == 1
