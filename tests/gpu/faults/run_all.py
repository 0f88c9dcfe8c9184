"""Faults and exact resume on a real GPU, as one script: `python tests/gpu/faults/run_all.py --json out.json`.

Every check starts `draftline train` as a user does, on the builtin target with captured steps. Each prints PASS or
FAIL with its figures; the exit code is the number of failures. `--device cpu --steps 12` shows that the script
itself works where there is no GPU; what needs CUDA is then skipped and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.faults.real_runs import final_state, metrics_of, result_of, settings  # noqa: E402

from draftline.resilience import faults  # noqa: E402
from draftline.resilience.faults import Fault  # noqa: E402

MAIN = "from draftline.cli import main; main()"
LEFT_BYTES = 2 * 2**30
"""Device memory that a run may take: the target and its drafter start, and the step does not fit."""
WITHIN_S = 10.0
KILLS = 3


class SkippedError(Exception):
    """A check that this machine cannot run."""


@dataclass(frozen=True)
class Bench:
    """Where and how long the checks train."""

    device: str
    steps: int
    folder: Path

    def flags(self, name: str, **changes: Any) -> list[str]:
        """A run of two targets and two drafters on one device."""
        every = max(2, self.steps // 10)
        flags = settings(
            self.folder / name,
            targets=0,
            drafters=0,
            optim__steps=self.steps,
            checkpoint__every=every,
            deadlines__startup_timeout_s=400,
            **changes,
        )
        flags += [f"--placement.targets={self.device}"] * 2
        return flags + [f"--placement.drafters={self.device}"] * 2

    def train(self, name: str, *armed: Fault, **changes: Any) -> tuple[int, float, str]:
        """Exit code, seconds and standard error of `draftline train` in the folder `name`."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            faults.VARIABLE: json.dumps([fault.model_dump() for fault in armed]),
        }
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "train", *self.flags(name, **changes)],
            env=environment, capture_output=True, text=True, timeout=580, check=False,
        )  # fmt: skip
        return done.returncode, time.monotonic() - began, done.stderr

    def must_train(self, name: str) -> None:
        """Train to the end."""
        code, _, err = self.train(name)
        assert code == 0, err[-3000:]

    def unbroken(self) -> str:
        """A run that nothing disturbs; made once."""
        if not (self.folder / "unbroken").exists():
            self.must_train("unbroken")
        return "unbroken"

    def require_cuda(self) -> None:
        """Raises SkippedError on a CPU."""
        if self.device == "cpu":
            raise SkippedError("needs CUDA")

    def differences(self, one: str, other: str) -> dict[str, Any]:
        """First step whose loss differs in any bit, and tensors of the final state that do."""
        losses = [[line["train/loss"] for line in metrics_of(self.folder / name)] for name in (one, other)]
        assert len(losses[0]) == len(losses[1]) == self.steps, [len(run) for run in losses]
        pairs = enumerate(zip(*losses, strict=True), start=1)
        first = next((step for step, (a, b) in pairs if a != b), None)
        ours, theirs = final_state(self.folder / one), final_state(self.folder / other)
        unequal = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
        spread = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
        return {"first_step": first, "tensors": unequal, "largest_relative_loss_difference": spread}

    def require_same(self, one: str, other: str) -> dict[str, Any]:
        """Two runs that are equal to the last bit."""
        found = self.differences(one, other)
        assert found["first_step"] is None, found
        assert not found["tensors"], found
        return {"steps": self.steps, "losses_and_final_state": "equal to the last bit"}


def check_two_runs_are_the_same_run(bench: Bench) -> dict[str, Any]:
    """Losses of two runs with captured steps agree to the last bit over all steps, and so do weights and moments."""
    bench.must_train("again")
    return bench.require_same("again", bench.unbroken())


def check_a_killed_run_ends_as_the_unbroken_one(bench: Bench) -> dict[str, Any]:
    """kill -9 past the middle, then the same command."""
    kill = Fault(worker="drafter-1", where="step", at=bench.steps * 5 // 9, kind="kill")
    code, _, err = bench.train("killed", kill)
    assert code == 1, err[-3000:]  # the parent process tells it
    assert "killed by SIGKILL" in err
    bench.must_train("killed")
    return bench.require_same("killed", bench.unbroken())


def check_many_kills(bench: Bench) -> dict[str, Any]:
    """Several kills at chosen steps and one inside a checkpoint's write."""
    chosen = random.Random(0)
    for _ in range(KILLS - 1):
        at = chosen.randrange(1, bench.steps)
        bench.train("kills", Fault(worker="target-0", where="row", at=6 * at, kind="kill"))
    every = max(2, bench.steps // 10)
    bench.train(
        "kills", Fault(worker="checkpoint", where="rename", at=bench.steps // every * every, kind="kill")
    )
    bench.must_train("kills")
    return bench.require_same("kills", bench.unbroken()) | {"kills": KILLS}


def check_sigterm_while_workers_start(bench: Bench) -> dict[str, Any]:
    """SIGTERM while a drafter compiles: exit code 75 once it is ready, and the same command trains."""
    code, seconds, err = bench.train(
        "stopped", Fault(worker="drafter-0", where="start", at=0, kind="terminate")
    )
    assert code == 75, err[-3000:]
    bench.must_train("stopped")
    return bench.require_same("stopped", bench.unbroken()) | {"seconds_to_stop": round(seconds, 1)}


def check_a_stalled_target_is_named(bench: Bench) -> dict[str, Any]:
    """A kernel that does not end: exit code 6, and the stacks of all threads."""
    spin = Fault(worker="target-1", where="row", at=31, kind="spin", seconds=60)
    code, _, err = bench.train("stalled", spin, deadlines__stall_timeout_s=8)
    assert code == 6, err[-3000:]
    assert "no progress for 8 s" in err
    result = result_of(bench.folder / "stalled")
    return {"worker": result["worker"], "row": result["row"], "cause": result["cause"][:300]}


def check_a_poisoned_device_ends_the_run_at_once(bench: Bench) -> dict[str, Any]:
    """A failed device assertion: no save from a dead context, an end within seconds, a clean resume."""
    bench.require_cuda()
    at = bench.steps * 5 // 9 * 6
    code, _, err = bench.train("poisoned", Fault(worker="target-0", where="row", at=at, kind="poison"))
    silent_s = time.time() - (bench.folder / "poisoned" / "metrics.jsonl").stat().st_mtime
    assert code == 1, err[-3000:]
    assert silent_s < WITHIN_S, silent_s
    bench.must_train("poisoned")
    return bench.require_same("poisoned", bench.unbroken()) | {"seconds_from_last_step": round(silent_s, 1)}


def check_too_little_memory_is_found_before_the_first_step(bench: Bench) -> dict[str, Any]:
    """A step that does not fit ends the run with code 7 while its worker starts, naming what to lower."""
    bench.require_cuda()
    changes = {"rows__token_budget": 16384, "rows__block_budget": 16384, "loss__chunk_rows": 131072}
    free, _ = torch.cuda.mem_get_info(bench.device)
    # taken here and not limited there: the trainer is a process of its own below the one that is started
    taken = torch.empty(free - LEFT_BYTES, dtype=torch.uint8, device=bench.device)
    try:
        code, _, err = bench.train("memory", **changes)
    finally:
        del taken
        torch.cuda.empty_cache()
    assert code == 7, err[-3000:]
    assert "rows.block_budget" in err
    assert result_of(bench.folder / "memory")["step"] in (None, 0)
    return {"message": err.strip().splitlines()[-2][:300]}


CHECKS: tuple[Callable[[Bench], dict[str, Any]], ...] = (
    check_two_runs_are_the_same_run,
    check_a_killed_run_ends_as_the_unbroken_one,
    check_a_poisoned_device_ends_the_run_at_once,
    check_sigterm_while_workers_start,
    check_a_stalled_target_is_named,
    check_too_little_memory_is_found_before_the_first_step,
    check_many_kills,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    on_cuda = arguments.device != "cpu"
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if on_cuda else "cpu",
        "torch": torch.__version__,
        "steps": arguments.steps,
    }
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.device, arguments.steps, Path(folder))
        for check in CHECKS:
            if arguments.only and check.__name__ not in arguments.only:
                continue
            word, outcome, seconds = run_check(check, bench)
            failures += word == "FAIL"
            results[check.__name__] = {"result": word, "outcome": outcome}
            print(word, check.__name__, f"{seconds:.0f} s", outcome, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    return failures


def run_check(check: Callable[[Bench], dict[str, Any]], bench: Bench) -> tuple[str, Any, float]:
    """PASS, FAIL or SKIP, its figures or its reason, and how long it took."""
    began = time.monotonic()
    try:
        return "PASS", check(bench), time.monotonic() - began
    except SkippedError as reason:
        return "SKIP", str(reason), time.monotonic() - began
    except Exception:  # noqa: BLE001 - every check is reported
        return "FAIL", traceback.format_exc()[-3000:], time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
