"""The drafter's step: `python benchmarks/step.py [--shapes 135M 8B 27B] [--json out.json]`.

Forward, backward, clipping and AdamW over one row of 4096 tokens with 512 blocks of 16, one document, every token
supervised, random weights: built, proved and captured as in a run. Operations are counted as in docs/speed.md; the
matmul peak, of bfloat16 whatever the linear maps multiply in, is measured in the same process, before and after.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from live import watched
from shapes import SHAPES, matmul_peak, median_ms, report, write_kernels

from draftline.compiling import compilations, gate
from draftline.config import Linears, TargetConfig
from draftline.data.rows import RowShape
from draftline.data.synthetic import SyntheticStore
from draftline.drafter.step import distinct_windows
from draftline.pipeline.build import build_drafter
from draftline.pipeline.calibrate import calibration_job, keep_head, random_target
from draftline.pipeline.costs import DrafterCost
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.memory import Sizes, drafter_worker
from draftline.pipeline.plan import Plan, choose_backend
from draftline.pipeline.reduce import Reducer
from draftline.pipeline.supervise import Abort


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """One shape's row of the table."""
    shape, on_cuda = SHAPES[name], device.type == "cuda"
    spec = shape.spec()
    dtype = torch.bfloat16 if on_cuda else torch.float32
    plan = Plan(
        "colocated",
        (device,),
        (device,),
        choose_backend(options.attention, on_cuda=on_cuda),
        dtype,
        options.linears,
        3,
        1,
    )
    windows = distinct_windows(spec) if on_cuda else ()
    rows = RowShape(options.tokens, options.blocks, spec.block_size, options.blocks, 7.0, windows)
    store = SyntheticStore(np.full(64, options.tokens), shape.vocab)
    # one layer is enough of a target: the step reads its head and its states only
    target = random_target(TargetConfig(path=name), shape.target(num_layers=1), dtype, device)
    small = spec.model_copy(update={"target_layer_ids": (0,)})
    job = replace(calibration_job(target, small, plan, rows, store, options.chunk_rows), spec=spec)
    keep_head(target)
    peak = matmul_peak(device)
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    place = Place.on(device)
    with place.entered():
        with gate.compiling("bench", deadline_s=900):
            built = build_drafter(job, Replicas(target), place, "bench", 0, None)
        reducer = Reducer(1, Abort(), 60)
        reducer.join(0, built.member)
        row = job.source.row(0)
        built.row.load(row)
        built.states.buffer.normal_()

        def row_step() -> None:
            built.step.replay(first=True)

        def step() -> None:
            row_step()
            with built.member.updating():
                reducer.reduce(0)
            built.member.await_update()

        with compilations() as compiled:
            milliseconds = median_ms(step, device, options.repeats)
            row_ms = median_ms(row_step, device, options.repeats)
        if options.profile is not None:
            write_kernels(step, device, options.profile / f"{name}.txt")
        place.settle()
    used = torch.cuda.max_memory_allocated(device) if on_cuda else 0
    cost = DrafterCost(spec, options.tokens, options.blocks)
    sizes = Sizes(
        dtype.itemsize,
        dtype.itemsize,
        True,
        options.linears == "float8",
        plan.backend == "flash",
        0,
        options.chunk_rows,
        rows_per_step=1,
    )
    head = shape.vocab * shape.hidden * dtype.itemsize
    counted_memory = drafter_worker(cost, sizes, 1, split=True).total + head
    peak = max(peak, matmul_peak(device))
    flops = cost.flops(options.tokens)
    return {
        "shape": name,
        "attention": plan.backend,
        "linears": options.linears,
        "step_ms": milliseconds,
        "row_ms": row_ms,
        "tflop": flops / 1e12,
        "share_of_peak": flops / (1e-3 * milliseconds) / peak,
        "peak_tflops": peak / 1e12,
        "memory_gib": used / 2**30,
        "counted_gib": counted_memory / 2**30,
        "recompiles": len(compiled),
        "tokens_per_s": options.tokens / (1e-3 * milliseconds),
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What a drafter step is measured with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B", "27B"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--chunk-rows", type=int, default=1024)
    parser.add_argument("--attention", choices=["auto", "flex", "flash"], default="auto")
    parser.add_argument("--linears", choices=get_args(Linears), default="drafter_dtype")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels of each shape (CUDA)")
    parser.add_argument("--memory", type=Path, help="folder for what lives at the peak of each shape (CUDA)")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows = []
    for name in options.shapes:
        out = options.memory and options.memory / f"{name}.txt"
        with watched(options.device, out) if out else nullcontext():
            rows.append(measure(name, options.device, options))
        report("drafter step", rows, options.device, options.json)


if __name__ == "__main__":
    main()
