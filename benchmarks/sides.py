"""Both sides of the pipeline alone, on this machine: `python benchmarks/sides.py [run.yaml] [--json out.json]`.

Times the target's tapped forward and the drafter's forward + backward over the rows of a run (the demo's when none
is named), one worker each with all of this machine's threads, as medians after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftline.console import Screen
from draftline.demo import demo_config
from draftline.pipeline.build import build_drafter, build_target
from draftline.pipeline.devices import Place, Replicas
from draftline.settings import parse_run
from draftline.setup import prepare_job

NUM_ROWS = 30
NUM_WARM = 5


def median_seconds(work: Callable[[int], None]) -> float:
    """Median time of `work(row)` over rows, after warm-up."""
    times = []
    for row in range(NUM_WARM + NUM_ROWS):
        start = time.perf_counter()
        work(row)
        times.append(time.perf_counter() - start)
    return statistics.median(times[NUM_WARM:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run.yaml; the demo's recipe when left out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = parse_run([arguments.run]) if arguments.run else demo_config("tiny", Path(folder))
        job = prepare_job(config.model_copy(update={"output": Path(folder)}), Screen(quiet=True)).job
        torch.set_num_threads(os.cpu_count() or 1)
        place, replicas = Place.on(job.plan.targets[0]), Replicas(job.target)
        target = build_target(job, replicas, place, "target-0")
        drafter = build_drafter(job, replicas, place, "drafter-0", 0, target.forward.states)
        rows = [job.source.row(i) for i in range(NUM_WARM + NUM_ROWS)]

        def run_target(row: int) -> None:
            target.forward.load(rows[row])
            target.step.replay()

        def run_drafter(row: int) -> None:
            drafter.row.load(rows[row])
            drafter.step.replay(first=row % job.schedule.rows_per_drafter == 0)

        target_s, drafter_s = median_seconds(run_target), median_seconds(run_drafter)
    tokens = statistics.mean(row.starts[-1] for row in rows)
    figures = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rows": {
            "tokens": job.shape.token_budget,
            "blocks": job.shape.block_budget,
            "real_tokens": round(tokens),
        },
        "target_tokens_per_s": round(tokens / target_s),
        "drafter_tokens_per_s": round(tokens / drafter_s),
        "target_row_ms": round(1000 * target_s, 2),
        "drafter_row_ms": round(1000 * drafter_s, 2),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
