"""kill -9, fifty times, at least twenty of them while a checkpoint is being written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.faults.toy_trainer import EVERY, STEPS, advance, initial, open_checkpoints

KILLS = 50
INSIDE_A_WRITE = 20


class Trainers:
    """Starts toy trainers, one at a time."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def _line(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def start(self, folder: Path) -> int:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{folder}\n")
        self._server.stdin.flush()
        return self._line()

    def exit_status(self) -> int:
        return self._line()


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    command = [sys.executable, "-m", "tests.faults.toy_trainer"]
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as server:
        yield Trainers(server)
        assert server.stdin is not None
        server.stdin.close()


def is_writing(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".tmp-*"))


def wait_for_a_write(folder: Path, patience_s: float = 2.0) -> None:
    deadline = time.monotonic() + patience_s
    while not is_writing(folder) and time.monotonic() < deadline:
        time.sleep(0.0005)


def kill_at_some_moment(pid: int, folder: Path, chosen: random.Random) -> None:
    """Anywhere in the first steps, or a little after a write has begun."""
    if chosen.random() < 0.3:
        time.sleep(chosen.uniform(0, 0.15))
    else:
        wait_for_a_write(folder)
        # a write takes a few milliseconds on an idle machine and many times that on a busy one
        time.sleep(chosen.uniform(0, 0.01) if chosen.random() < 0.3 else 0)
    kill(pid)


def kill(pid: int) -> None:
    """SIGKILL; a trainer that came to its end a moment before is told by its exit status."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_run_killed_fifty_times_ends_in_the_same_state_as_the_unbroken_run(
    tmp_path: Path, trainers: Trainers
) -> None:
    chosen, folder = random.Random(6), tmp_path / "run"
    inside = kills = 0
    while kills < KILLS or inside < INSIDE_A_WRITE:
        pid = trainers.start(folder)
        kill_at_some_moment(pid, folder, chosen)
        if trainers.exit_status() == 0:
            start_over(folder)
            continue
        kills += 1
        inside += is_writing(folder)
        assert kills < 3 * KILLS, f"only {inside} of {kills} kills hit a write"
    assert trainers.start(folder) > 0
    assert trainers.exit_status() == 0
    assert_equal_to_the_unbroken_run(folder)
    assert "damaged" not in (folder / "log").read_text()
    print(f"{kills} kills, {inside} inside a write")


def start_over(folder: Path) -> None:
    """A run that came to its end is checked, and the next kills hit a new one."""
    assert_equal_to_the_unbroken_run(folder)
    folder.rename(folder.with_name(f"{folder.name}-{time.monotonic_ns()}"))


def assert_equal_to_the_unbroken_run(folder: Path) -> None:
    state = initial()
    while state.step < STEPS:
        state = advance(state)
    loaded = open_checkpoints(folder).load_latest()
    assert loaded is not None
    assert loaded.step == STEPS
    assert torch.equal(loaded.tensors["state.safetensors"]["weights"], state.weights)
    assert torch.equal(loaded.tensors["state.safetensors"]["momentum"], state.momentum)


def test_a_kill_loses_at_most_the_steps_of_two_checkpoint_intervals(
    tmp_path: Path, trainers: Trainers
) -> None:
    chosen, folder = random.Random(7), tmp_path / "run"
    for _ in range(8):
        pid = trainers.start(folder)
        wait_for_a_write(folder)
        time.sleep(chosen.uniform(0.02, 0.06))
        kill(pid)
        if trainers.exit_status() == 0:
            break
        loaded = open_checkpoints(folder).load_latest()
        resumed = 0 if loaded is None else loaded.step
        assert int((folder / "reached").read_text()) - resumed <= 2 * EVERY
