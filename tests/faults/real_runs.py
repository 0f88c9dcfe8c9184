"""Real training runs, seconds each: the builtin target, a drafter of one layer, everything else as users have it.

In this process `run_settings` gives the flags of `draftline train`. For runs that must die, `python -m
tests.faults.real_runs` imports everything once and forks a trainer for each line on its standard input (a fresh
interpreter costs more than the run); `Trainers` is the other end of that pipe.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import draftline
from draftline.console import Screen
from draftline.resilience import faults
from draftline.resilience.ending import exit_code, explained
from draftline.resilience.faults import Fault
from draftline.run import train
from draftline.settings import parse_run

REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(draftline.__file__).parents[1]
"""Where this process has the package from; others must have it from there too, also when it is a mutated copy."""
STEPS, EVERY, ROWS_PER_STEP = 8, 2, 6

SETTINGS = {
    "target.path": "builtin:tiny",
    "data.path": "builtin:demo",
    "data.max-length": 128,
    "rows.token-budget": 128,
    "rows.block-budget": 16,
    "drafter.num-layers": 1,
    "drafter.block-size": 8,
    "drafter.num-taps": 2,
    "drafter.intermediate-size": 64,
    "optim.rows-per-step": ROWS_PER_STEP,
    "optim.steps": STEPS,
    "optim.lr": 3e-3,
    "placement.mode": "split",
    "checkpoint.every": EVERY,
}


def settings(output: Path, targets: int = 1, drafters: int = 1, **changes: Any) -> list[str]:
    """Flags of `draftline train`; `optim__steps=4` is `--optim.steps=4`, None leaves a flag out."""
    values = (
        SETTINGS
        | {"output": output}
        | {k.replace("__", ".").replace("_", "-"): v for k, v in changes.items()}
    )
    flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*flags, *["--placement.targets=cpu"] * targets, *["--placement.drafters=cpu"] * drafters]


def train_here(flags: Sequence[str], screen: Screen | None = None) -> None:
    """Run in this process; raises what the run ends with."""
    train(parse_run(flags), screen or Screen(quiet=True), ("draftline", "train", *flags))


def result_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "result.json").read_text())


def metrics_of(output: Path) -> list[dict[str, float]]:
    """Records of training steps, in the order of the file."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def final_state(output: Path) -> dict[str, torch.Tensor]:
    """Masters, moments and step count of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return load_file(newest / "state.safetensors")


def assert_same_state(ours: Path, theirs: Path) -> None:
    """Equal to the last bit: weights, both moments, step count, and the exported drafter."""
    one, other = final_state(ours), final_state(theirs)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    exports = [(path / "drafter" / "model.safetensors").read_bytes() for path in (ours, theirs)]
    assert exports[0] == exports[1]


class Trainers:
    """Starts trainers in processes of their own, one at a time."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, flags: Sequence[str], log: Path, *armed: Fault, kill_after_s: float | None = None) -> int:
        """Exit code of a trainer, negative for a signal; its screen goes to `log`."""
        request = {
            "flags": list(flags),
            "log": str(log),
            "faults": [fault.model_dump() for fault in armed],
            "kill_after_s": kill_after_s,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@contextmanager
def trainers() -> Iterator[Trainers]:
    """A warm server of trainers."""
    command = [sys.executable, "-m", "tests.faults.real_runs"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as server:
        yield Trainers(server)
        assert server.stdin is not None
        server.stdin.close()


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()  # nothing has computed here yet, so there are no threads to lose
        if child == 0:
            os._exit(_train_as_asked(request))
        print(_outcome(child, request["kill_after_s"]), flush=True)


def _outcome(child: int, kill_after_s: float | None) -> int:
    """The child's exit code; it is killed here, where its number cannot have become another's."""
    deadline = time.monotonic() + (kill_after_s or float("inf"))
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def _train_as_asked(request: dict[str, Any]) -> int:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (0, 1, 2):
        os.dup2(log, stream)
    if request["faults"]:
        faults.arm_from_environment({faults.VARIABLE: json.dumps(request["faults"])})
    try:
        train_here(request["flags"], Screen())
    except BaseException as error:  # noqa: BLE001 - as the command line ends
        known = explained(error)
        print(f"{type(known).__name__}: {known}", flush=True)
        return exit_code(known)
    return 0


if __name__ == "__main__":
    _serve()
