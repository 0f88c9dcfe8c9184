"""A tiny training run with real checkpoints, in a process that a test may kill at any moment.

`python -m tests.faults.toy_trainer` imports torch once and forks a trainer for every folder named on its
standard input (a fresh interpreter for each of 50 kills would take minutes). It answers the process number,
and later the exit status.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftline.checkpoint import Checkpointer, Identity, Snapshot
from draftline.resilience.folder import RunFolder

STEPS = 120
EVERY = 5
WIDTH = 500
"""2 MB of state: writing and hashing it takes several steps."""


@dataclass
class State:
    """Weights and momentum, [WIDTH, WIDTH] each."""

    step: int
    weights: Tensor
    momentum: Tensor


def initial() -> State:
    return State(0, torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH))


def advance(state: State) -> State:
    """One step; the gradient follows from the step and the weights, and order matters to every bit."""
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(state.step))
    momentum = 0.9 * state.momentum + 0.1 * (state.weights.roll(1, 0) - noise)
    return State(state.step + 1, state.weights - 0.05 * momentum, momentum)


def train(folder: Path) -> None:
    """Resume and go on to STEPS, recording notes and progress beside the checkpoints for the test."""
    with RunFolder(folder, "toy"), open_checkpoints(folder) as saver:
        state, notes = initial(), ()
        if (loaded := saver.load_latest()) is not None:
            state, notes = State(loaded.step, **loaded.tensors["state.safetensors"]), loaded.notes
        with (folder / "log").open("a") as log:
            log.write("".join(f"{note}\n" for note in notes))
        reached = os.open(folder / "reached", os.O_WRONLY | os.O_CREAT)
        while state.step < STEPS:
            state = advance(state)
            os.pwrite(reached, b"%6d" % state.step, 0)
            saver.check()
            if state.step % EVERY == 0:
                saver.save(snapshot(state))


def open_checkpoints(folder: Path) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", Identity(config={"toy": True}), keep=2, write_timeout_s=30)


def snapshot(state: State) -> Snapshot:
    tensors = {"weights": state.weights, "momentum": state.momentum}
    return Snapshot(step=state.step, row=state.step, tensors={"state.safetensors": tensors})


def serve() -> None:
    """Fork a trainer for each folder on standard input."""
    torch.set_num_threads(1)  # no threads before the forks
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            train(Path(line.strip()))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
