"""What float8 linear maps do to the loss: `python benchmarks/float8_loss.py [--steps 300] [--json out.json]`.

Trains the demo's drafter on the embedded target with ordinary linear maps and with float8 ones, from the same seed and
so from the same weights over the same rows; several seeds show how far two ordinary runs are apart. On a CPU float8 is
emulated. `loss` is the mean of the last tenth of the steps, `eval_ce` and `tau` are of unseen prompts, in ordinary
precision for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from shapes import report

from draftline.config import Linears, RunConfig
from draftline.console import Screen
from draftline.demo import demo_config
from draftline.pipeline.plan import available_devices
from draftline.resilience.folder import METRICS
from draftline.run import train


def run_config(linears: Linears, seed: int, steps: int, output: Path) -> RunConfig:
    """The demo's run with these linear maps."""
    config = demo_config("tiny", output)
    return config.model_copy(
        update={
            "seed": seed,
            "optim": config.optim.model_copy(update={"steps": steps}),
            "placement": config.placement.model_copy(update={"drafter_linears": linears}),
        }
    )


def last_losses(folder: Path, steps: int) -> list[float]:
    """Losses of the last tenth of a run's steps."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses[-max(1, steps // 10) :]


def measure(linears: Linears, seed: int, steps: int) -> dict[str, Any]:
    """One run's row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = train(run_config(linears, seed, steps, folder), Screen(quiet=True))
        loss = statistics.mean(last_losses(folder, steps))
    assert trained.after is not None
    overall = trained.after.overall
    return {
        "seed": seed,
        "linears": linears,
        "steps": steps,
        "loss": loss,
        "eval_ce": trained.after.ce,
        "tau": overall.tau,
        "tau_low": overall.tau_low,
        "tau_high": overall.tau_high,
        "seconds": trained.seconds,
    }


def main() -> None:
    """Train every pair, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device: torch.device = available_devices()[0]
    float8: Linears = "float8" if device.type == "cuda" else "float8_emulated"
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        both: tuple[Linears, Linears] = ("drafter_dtype", float8)
        rows += [measure(linears, seed, options.steps) for linears in both]
        report("float8 linear maps", rows, device, options.json)


if __name__ == "__main__":
    main()
