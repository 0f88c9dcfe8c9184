"""The whole pipeline beside its sides: `python benchmarks/pipeline.py [--shapes 135M 8B] [--json out.json]`.

Sides are timed alone on the first device; then real runs: colocated on each device, split 1 + 1 (on one device
twice, or on two), and 5 target + 3 drafter threads over all of them. Rows hold 4096 tokens of a chat-like length
mix and 512 blocks. The expected rate follows from the sides: the slower one for separate devices, their sum for a
device that does both. `--trace trace.json` trains the first run once more and writes one second of it as a
timeline for Perfetto.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, report
from torch.profiler import ProfilerActivity, profile

from draftline.compiling import compilations, tripwire
from draftline.config import OptimConfig, TargetConfig
from draftline.data.rows import RowShape
from draftline.data.synthetic import SyntheticStore, mixed_lengths
from draftline.drafter.step import distinct_windows
from draftline.drafter.worker import StepRecord
from draftline.pipeline.calibrate import Calibration, calibrate, calibration_job, random_target
from draftline.pipeline.costs import DrafterCost, count_target
from draftline.pipeline.engine import Engine, Finished, TargetFinished
from draftline.pipeline.job import Job
from draftline.pipeline.memory import Sizes, device_memory
from draftline.pipeline.placement import Mode, rows_per_s
from draftline.pipeline.plan import Plan, choose_backend
from draftline.pipeline.schedule import Schedule

WARM_STEPS = 4
ROWS_PER_DRAFTER = 2
"""In one optimizer step."""
TRACE_S = 1.0


PLACEMENTS = ("colocated", "split", "many")


def placement(name: str, devices: list[torch.device]) -> tuple[Mode, list[torch.device], list[torch.device]]:
    """(mode, targets, drafters) of a run; `many` is 5 target and 3 drafter threads over all devices."""
    if name == "colocated":
        return "colocated", devices, devices
    if name == "split":
        return "split", devices[:1], devices[-1:]
    targets = [devices[i % len(devices)] for i in range(5)]
    return "split", targets, [devices[-1 - i % len(devices)] for i in range(3)]


def write_trace(job: Job, trace: Path) -> None:
    """Train, and write one second of it; a run of its own, because a profiler slows what it watches."""
    profiler: profile | None = None
    for event in Engine(job).events():
        if isinstance(event, StepRecord) and event.step >= WARM_STEPS and profiler is None:
            profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
            profiler.start()
            time.sleep(TRACE_S)  # the main thread has nothing to do; the workers go on
            profiler.stop()
    assert profiler is not None
    profiler.export_chrome_trace(str(trace))


def run(job: Job) -> dict[str, Any]:
    """Train; rows a second after warm-up, and each side's share of waiting."""
    begin = end = 0.0
    rows, waits, tokens = 0, {"target": 0.0, "drafter": 0.0}, 0
    with compilations() as compiled:
        for event in Engine(job).events():
            if isinstance(event, TargetFinished):
                waits["target"] += event.wait_s
            if isinstance(event, Finished):
                waits["drafter"] += event.wait_s
            if not isinstance(event, StepRecord):
                continue
            end = time.perf_counter()
            if event.step < WARM_STEPS:
                begin, compiled[:] = end, []
                continue
            rows, tokens = rows + len(event.rows), tokens + event.num_tokens
    seconds = end - begin
    return {
        "rows_per_s": rows / seconds,
        "tokens_per_s": tokens / seconds,
        "target_wait": waits["target"] / (seconds * len(job.plan.targets)),
        "drafter_wait": waits["drafter"] / (seconds * len(job.plan.drafters)),
        "recompiles": len(compiled),
        "dense_calls": len(tripwire.dense_calls()),
    }


def release(devices: list[torch.device]) -> None:
    """Give back what earlier workers held, and start to watch memory anew."""
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def measure(name: str, devices: list[torch.device], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table for one shape."""
    shape, on_cuda = SHAPES[name], devices[0].type == "cuda"
    spec = shape.spec()
    dtype = torch.bfloat16 if on_cuda else torch.float32
    backend = choose_backend(options.attention, on_cuda=on_cuda)
    windows = distinct_windows(spec) if on_cuda else ()
    rows = RowShape(options.tokens, options.blocks, spec.block_size, options.blocks, 7.0, windows)
    store = SyntheticStore(mixed_lengths(2000, options.tokens), shape.vocab)
    config = shape.target(num_layers=max(spec.target_layer_ids) + 1)
    target = random_target(TargetConfig(path=name), config, dtype, devices[0])
    alone_plan = Plan("colocated", (devices[0],), (devices[0],), backend, dtype, "drafter_dtype", 3, 1)
    base = calibration_job(target, spec, alone_plan, rows, store, 1024, ROWS_PER_DRAFTER)
    sides: Calibration = calibrate(base)
    for mode, targets, drafters in (placement(name, devices) for name in options.placements):
        plan = Plan(mode, tuple(targets), tuple(drafters), backend, dtype, "drafter_dtype", 3, 1)
        per_step = ROWS_PER_DRAFTER * len(drafters)
        job = replace(
            base,
            plan=plan,
            schedule=Schedule(options.steps, per_step, len(targets), len(drafters)),
            optim=OptimConfig(steps=options.steps),
        )
        # threads that share a device share its time: the bound counts devices, not threads
        apart = not set(targets) & set(drafters)
        bound_mode = "split" if mode == "split" and apart else "colocated"
        bound = rows_per_s(bound_mode, sides.times(per_step), len(set(targets)), len(set(drafters)))
        counted = device_memory(
            targets,
            drafters,
            count_target(target.model, spec.target_layer_ids),
            DrafterCost(spec, options.tokens, options.blocks),
            Sizes(
                dtype.itemsize,
                dtype.itemsize,
                True,
                False,
                plan.backend == "flash",
                plan.channel_slots,
                1024,
                per_step,
            ),
            split=mode == "split",
        )
        release(devices)
        outcome = run(job)
        if options.trace is not None:
            write_trace(job, options.trace)
            options.trace = None
        fullest = max(counted, key=lambda device: counted[device].total)
        yield {
            "shape": name,
            "attention": backend,
            "placement": f"{mode} {len(targets)} + {len(drafters)} on {len({*targets, *drafters})}",
            "target_ms": 1e3 * sides.target_s,
            "drafter_ms": 1e3 * sides.times(per_step).drafter_s,
            **outcome,
            "share_of_bound": outcome["rows_per_s"] / bound,
            "memory_gib": torch.cuda.max_memory_allocated(fullest) / 2**30 if on_cuda else 0.0,
            "counted_gib": counted[fullest].total / 2**30,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--attention", choices=["auto", "flex", "flash"], default="auto")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = torch.cuda.device_count() if options.device == "cuda" else 1
    devices = [
        torch.device(options.device, i) if options.device == "cuda" else torch.device("cpu")
        for i in range(count)
    ]
    table = []
    for name in options.shapes:
        for row in measure(name, devices, options):
            table.append(row)
            report("pipeline", table, devices[0], options.json)


if __name__ == "__main__":
    main()
