"""Tiles of the drafter's block-sparse attention: `python benchmarks/tiles.py [--shapes 135M 8B] [--json out.json]`.

Compiled flex_attention alone, forward and backward of one layer over one row of `step.py` (4096 tokens in one document,
512 blocks of 16), with each of some tile sizes. CUDA only. `draftline.drafter.attention.HOPPER_TILES` holds what won.
A form that does not compile (Triton refuses some) is a line that says so.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, Shape, report
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from draftline.compiling.isolate import compile_isolated
from draftline.data.rows import RowShape, RowSource
from draftline.data.synthetic import SyntheticStore
from draftline.data.transfer import DeviceRow
from draftline.drafter.attention import flex_attend, kernel_options
from draftline.drafter.mask import mask_mod

TOKENS, BLOCKS, BLOCK = 4096, 512, 16
REPEATS = 12
FORWARD = {
    "64 x 64": {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
    "64 x 128": {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 3, "num_warps": 4},
    "128 x 64": {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8},
}
BACKWARD = {
    "64 / 128, 8 warps": {"M": 64, "N": 128, "num_stages": 3, "num_warps": 8},
    "32 / 64, 4 warps": {"M": 32, "N": 64, "num_stages": 3, "num_warps": 4},
    "64 / 64, 4 warps": {"M": 64, "N": 64, "num_stages": 3, "num_warps": 4},
}
"""Tiles of the queries and of the keys: (M, N) where keys stay, (N, M) where queries do."""


def forms() -> dict[str, dict[str, Any]]:
    """Name -> options of flex_attention."""
    found: dict[str, dict[str, Any]] = {"Inductor's own": {}}
    for tma in (False, True):
        for (forward, ahead), (backward, behind) in zip(FORWARD.items(), BACKWARD.items(), strict=True):
            outer, inner = behind["N"], behind["M"]
            sizes = {"BLOCK_M1": inner, "BLOCK_N1": outer, "BLOCK_M2": outer, "BLOCK_N2": inner}
            rest = {name: value for name, value in behind.items() if name.startswith("num")}
            options = {f"fwd_{name}": value for name, value in (ahead | {"USE_TMA": tma}).items()}
            options |= {f"bwd_{name}": value for name, value in (sizes | rest | {"USE_TMA": tma}).items()}
            found[f"{forward}; {backward}{'; tma' if tma else ''}"] = options
    return found


def attention_of(shape: Shape, options: dict[str, Any], device: torch.device) -> Callable[..., Tensor]:
    """Compiled attention of one layer over the row."""
    rows = RowShape(TOKENS, BLOCKS, BLOCK, BLOCKS, 7.0, ((None, False),))
    source = RowSource(SyntheticStore(np.full(8, TOKENS), shape.vocab), rows, seed=0)
    row = DeviceRow(source.row(0), device)
    inputs = row.anchors, row.anchor_valid, row.document_ids, row.positions
    rule = mask_mod(*inputs, block_size=BLOCK, window=None, causal=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attend(row.tables, [rule], flex_attention, options)(0, q, k, v)

    return compile_isolated(attention, "tiles")


def measure(shape: Shape, options: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of the forward and of the backward kernel."""
    attend = attention_of(shape, options, device)

    def heads(tokens: int, count: int) -> Tensor:
        x = torch.randn(tokens, count, shape.head_dim, device=device, dtype=torch.bfloat16)
        return x.transpose(0, 1).requires_grad_()

    queries = BLOCKS * BLOCK
    given = heads(queries, shape.heads), *(heads(TOKENS + queries, shape.kv_heads) for _ in range(2))
    slope = torch.randn_like(attend(*given))
    torch.autograd.grad(attend(*given), given, slope)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(REPEATS):
            torch.autograd.grad(attend(*given), given, slope)
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() or () if event.name.startswith("triton_tem")]
    times: tuple[list[float], list[float]] = ([], [])
    for event in events:
        times["backward" in event.name].append(event.device_time / 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135M", "8B"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        shape = SHAPES[name]
        chosen = kernel_options(shape.head_dim, torch.cuda.get_device_capability(device))
        for form, tiles in {**forms(), "as trained": chosen}.items():
            try:
                forward, backward = measure(shape, tiles, device)
            except Exception as error:  # noqa: BLE001 - Triton refuses some forms; the line says so
                rows.append(
                    {
                        "shape": name,
                        "form": form,
                        "forward_ms": None,
                        "backward_ms": None,
                        "note": str(error)[:120],
                    }
                )
                continue
            rows.append(
                {"shape": name, "form": form, "forward_ms": forward, "backward_ms": backward, "note": ""}
            )
    report("attention tiles", rows, device, options.json)


if __name__ == "__main__":
    main()
