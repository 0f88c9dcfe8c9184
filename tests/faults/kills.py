"""kill -9 of real training runs, at random moments and inside checkpoint writes, until the run is done.

    python -m tests.faults.kills --kills 50 --json benchmarks/results/NAME.json

Every run is compared with an unbroken one, bit by bit. A smaller number runs with the tests
(test_kill_real_runs.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from draftline.resilience.faults import Fault
from tests.faults.real_runs import (
    EVERY,
    ROWS_PER_STEP,
    STEPS,
    Trainers,
    assert_same_state,
    metrics_of,
    settings,
    train_here,
    trainers,
)

INSIDE = ("file", "manifest", "rename", "retire")
"""Points of a checkpoint's write."""
MOST_S = 3.0
"""Longest time from the start of a trainer to a random kill."""


@dataclass
class Tally:
    """What has been done so far."""

    kills: int = 0
    inside_a_write: int = 0
    finished_runs: int = 0
    """Runs that came to their end after some kills, each found equal to the unbroken run."""
    most_steps_lost: int = 0
    """Steps that a kill cost, at most."""


class Killer:
    """One run after the other, each killed until it is done."""

    def __init__(self, folder: Path, store: Path, unbroken: Path, warm: Trainers, seed: int) -> None:
        self._folder, self._store, self._unbroken, self._warm = folder, store, unbroken, warm
        self._chosen = random.Random(seed)
        self.tally = Tally()
        self._run = folder / "run-0"

    def kill_once(self, *, inside: bool) -> None:
        """Start or resume the current run and kill it; when it ends before that, compare it and begin another."""
        fault = self._fault() if inside else None
        flags = settings(self._run, data__path=self._store)
        faults, patience_s = ([fault], None) if fault else ([], self._chosen.uniform(0, MOST_S))
        status = self._warm.run(flags, self._folder / "log", *faults, kill_after_s=patience_s)
        if status == 0:
            self._compare()
            return
        assert status == -signal.SIGKILL, (self._folder / "log").read_text()[-2000:]
        self.tally.kills += 1
        self.tally.inside_a_write += inside
        self.tally.most_steps_lost = max(self.tally.most_steps_lost, self._steps_lost())

    def finish(self) -> None:
        """Let the current run come to its end, and compare it."""
        status = self._warm.run(settings(self._run, data__path=self._store), self._folder / "log")
        assert status == 0, (self._folder / "log").read_text()[-2000:]
        self._compare()

    def _fault(self) -> Fault:
        """A kill inside the write of one of the checkpoints that are still to come."""
        to_come = list(range(self._newest() + EVERY, STEPS + 1, EVERY))
        at = self._chosen.choice(to_come or [STEPS])
        return Fault(worker="checkpoint", where=self._chosen.choice(INSIDE), at=at, kind="kill")

    def _newest(self) -> int:
        found = (self._run / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def _steps_lost(self) -> int:
        if not (self._run / "metrics.jsonl").is_file():
            return 0
        reached = [line["progress/step"] for line in metrics_of(self._run)]
        return int(max(reached, default=0)) - self._newest() if reached else 0

    def _compare(self) -> None:
        assert_same_state(self._run, self._unbroken)
        steps = [line["progress/step"] for line in metrics_of(self._run)]
        assert steps == list(range(1, STEPS + 1)), "each step once, in order"
        assert not (self._run / "checkpoints" / "quarantine").exists()
        self.tally.finished_runs += 1
        self._run = self._folder / f"run-{self.tally.finished_runs}"


def kill_many(killer: Killer, kills: int, inside: int) -> Tally:
    """At least `kills` kills, at least `inside` of them inside a write, then one undisturbed end."""
    tally = killer.tally
    while tally.kills < kills or tally.inside_a_write < inside:
        killer.kill_once(inside=tally.inside_a_write * kills <= tally.kills * inside)
    killer.finish()
    assert tally.most_steps_lost <= 2 * EVERY
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, trainers() as warm:
        unbroken = Path(folder) / "unbroken"
        train_here(settings(unbroken))
        killer = Killer(Path(folder), unbroken / "store", unbroken, warm, arguments.seed)
        tally = kill_many(killer, arguments.kills, arguments.inside)
    outcome = {
        "command": f"python -m tests.faults.kills --kills {arguments.kills} --inside {arguments.inside}",
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()}",
        "torch": torch.__version__,
        "run": {"steps": STEPS, "rows_per_step": ROWS_PER_STEP, "checkpoint_every": EVERY},
        **asdict(tally),
        "final states equal to the unbroken run": "all, to the last bit",
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(outcome, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
