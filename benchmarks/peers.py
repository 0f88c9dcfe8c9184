"""The drafter's step beside other trainers': `python benchmarks/peers.py [--shapes 135M 8B 27B] [--require NAME]`.

The row, the shapes and the counted operations of `step.py` for Draftline, speculators and SpecForge: each peer's own
drafter, loss, clipping and AdamW, called as its trainer calls them (peer_steps.py), over tensors that lie on the
device. Every measurement has a process of its own, so that no trainer meets another's settings, caches or memory; the
matmul peak is the best of those measured around a shape's steps. Peak memory is that of the peers' timed steps, and
for Draftline that of building as well. A peer that cannot be imported is a line that says why.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import Any

import torch
from peer_steps import PEERS, make_row
from shapes import matmul_peak, median_ms, report
from step import arguments
from step import measure as measure_draftline
from torch import nn

from draftline.compiling import compilations
from draftline.pipeline.costs import DrafterCost

NUM_COMPILING = 3
"""Steps before the warm-up, in which a peer may compile."""
FIGURES = ("step_ms", "tflop", "share_of_peak", "peak_tflops", "memory_gib", "recompiles", "tokens_per_s")
DRAFTLINE_NOTES = "anchors and block table come with the row: they are not made in the step"


def absent_peers() -> dict[str, str]:
    """The peers that cannot be imported here, and why."""
    absent = {}
    for name, peer in PEERS.items():
        try:
            for module in peer.needs:
                importlib.import_module(module)
        except ImportError as error:
            absent[name] = f"not installed: {error}"
    return absent


def measure_peer(name: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table, whatever happens to the peer."""
    try:
        return _measure_peer(name, shape, options)
    except Exception as error:  # noqa: BLE001 - another's code may fail in any way; the line and stderr say how
        traceback.print_exc()
        return unmeasured(name, shape, f"failed: {type(error).__name__}: {error}".splitlines()[0])


def _measure_peer(name: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    peer, device = PEERS[name], options.device
    row = make_row(shape, options)
    cost = DrafterCost(row.spec, options.tokens, options.blocks)
    peak = matmul_peak(device)
    built = peer.build(row)
    check_size(built.model, cost)
    losses = [float(built.step()) for _ in range(NUM_COMPILING)]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"its first losses are {losses}: are all its weights filled?")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with compilations() as compiled:
        milliseconds = median_ms(built.step, device, options.repeats)
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peer": f"{name} {version_of(name)}",
        "shape": shape,
        "step_ms": milliseconds,
        "tflop": cost.flops(options.tokens) / 1e12,
        "peak_tflops": max(peak, matmul_peak(device)) / 1e12,
        "memory_gib": used / 2**30,
        "recompiles": len(compiled),
        "tokens_per_s": options.tokens / (1e-3 * milliseconds),
        "notes": f"{built.path}; {peer.notes}",
    }


def version_of(name: str) -> str:
    """The installed version of a peer; a source folder on the path has none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def check_size(model: nn.Module, cost: DrafterCost) -> None:
    """Refuse a drafter that is not the one whose operations are counted."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if trained != cost.num_weights:
        raise ValueError(
            f"it trains {trained:,} weights, the shape has {cost.num_weights:,}: not the same drafter"
        )


def unmeasured(name: str, shape: str, why: str) -> dict[str, Any]:
    """The line of a peer without figures."""
    return {"peer": name, "shape": shape, **dict.fromkeys(FIGURES), "notes": why}


def with_one_peak(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of one shape, all compared with the best peak that was measured around them."""
    peak = max(line["peak_tflops"] for line in lines if line["peak_tflops"])
    columns = ("peer", "shape", *FIGURES, "notes")
    compared = []
    for line in lines:
        share = line["step_ms"] and line["tflop"] / (1e-3 * line["step_ms"]) / peak
        whole = {**line, "share_of_peak": share, "peak_tflops": peak}
        compared.append({name: whole[name] for name in columns})
    return compared


def alone(work: Callable[..., Any], *given: Any, seconds: float) -> Any:
    """What `work` returns in a process of its own.

    Raises:
        BrokenProcessPool: it ended without an answer, or took longer than `seconds`.
    """
    limit = (seconds,)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_after, initargs=limit) as pool:
        return pool.submit(work, *given).result()


def end_after(seconds: float) -> None:
    """End this process after so long, with what every thread was at on stderr."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def measure_peer_alone(name: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table from a process of its own, whatever becomes of that."""
    try:
        return alone(measure_peer, name, shape, options, seconds=options.deadline)
    except BrokenProcessPool:
        return unmeasured(name, shape, f"failed: {ended(options.deadline)}")


def alone_or_exit(what: str, work: Callable[..., Any], *given: Any, seconds: float) -> Any:
    """What `work` returns in a process of its own; without an answer, the end of this one."""
    try:
        return alone(work, *given, seconds=seconds)
    except BrokenProcessPool:
        sys.exit(f"{what}: {ended(seconds)}")


def ended(seconds: float) -> str:
    """Why a process gave no figures."""
    return f"its process ended without figures, or was ended after {seconds:.0f} s"


def refuse(required: list[str], unfit: dict[str, str]) -> None:
    """End with an error when a required peer has no figures."""
    for name in required:
        if name in unfit:
            sys.exit(f"--require {name}: {unfit[name]}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--require", nargs="+", choices=PEERS, default=[], help="an error unless it is measured"
    )
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for each measurement")
    options = parser.parse_args()
    absent = alone_or_exit("looking for peers", absent_peers, seconds=options.deadline)
    refuse(options.require, absent)
    lines: list[dict[str, Any]] = []
    for shape in options.shapes:
        given = shape, options.device, options
        own = alone_or_exit(f"draftline {shape}", measure_draftline, *given, seconds=options.deadline)
        of_shape = [{**own, "peer": "draftline", "notes": DRAFTLINE_NOTES}]
        for name in PEERS:
            if name in absent:
                of_shape.append(unmeasured(name, shape, absent[name]))
            else:
                of_shape.append(measure_peer_alone(name, shape, options))
            # after each: what follows may take long, or end the machine's time
            report(
                "drafter step beside other trainers",
                lines + with_one_peak(of_shape),
                options.device,
                options.json,
            )
        lines += with_one_peak(of_shape)
    refuse(options.require, {line["peer"]: line["notes"] for line in lines if line["step_ms"] is None})


if __name__ == "__main__":
    main()
