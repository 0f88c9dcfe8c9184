"""The target's tapped forward: `python benchmarks/target.py [--shapes 135M 8B] [--json out.json]`.

One packed row of 8192 tokens in 4 documents, 5 taps, nothing after the last tap, random weights: built as in a run
(varlen attention, layers compiled, one CUDA graph). The matmul peak is measured in the same process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, matmul_peak, median_ms, report, write_kernels

from draftline.compiling import compilations, gate
from draftline.config import TargetConfig
from draftline.data.rows import RowShape
from draftline.data.synthetic import SyntheticStore
from draftline.pipeline.build import build_target
from draftline.pipeline.calibrate import calibration_job, random_target
from draftline.pipeline.costs import count_target
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.plan import Plan, choose_backend


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
        "drafter_dtype",
        3,
        1,
    )
    document = options.tokens // options.documents
    rows = RowShape(options.tokens, 128, spec.block_size, 128, 7.0, ())
    store = SyntheticStore(np.full(64 * options.documents, document), shape.vocab)
    config = shape.target(num_layers=max(spec.target_layer_ids) + 1)
    target = random_target(TargetConfig(path=name), config, dtype, device)
    job = calibration_job(target, spec, plan, rows, store, 1024)
    peak = matmul_peak(device)
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    place = Place.on(device)
    with place.entered():
        with gate.compiling("bench", deadline_s=900):
            built = build_target(job, Replicas(target), place, "bench")
        with compilations() as compiled:
            milliseconds = median_ms(built.step.replay, device, options.repeats)
        if options.profile is not None:
            write_kernels(built.step.replay, device, options.profile / f"{name}.txt")
        place.settle()
    peak = max(peak, matmul_peak(device))
    flops = count_target(target.model, spec.target_layer_ids).flops(options.tokens, document)
    return {
        "shape": name,
        "forward_ms": milliseconds,
        "tflop": flops / 1e12,
        "share_of_peak": flops / (1e-3 * milliseconds) / peak,
        "peak_tflops": peak / 1e12,
        "tokens_per_s": options.tokens / (1e-3 * milliseconds),
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_cuda else 0.0,
        "recompiles": len(compiled),
        "form": "; ".join(built.notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B", "27B"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--attention", choices=["auto", "flex", "flash"], default="auto", help="of the run")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", type=Path, help="folder for a table of kernels of each shape (CUDA)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.shapes:
        rows.append(measure(name, options.device, options))
        report("target forward", rows, options.device, options.json)


if __name__ == "__main__":
    main()
