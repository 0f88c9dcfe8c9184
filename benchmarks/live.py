"""What lies in a GPU's memory when most of it is in use: tensors by size and by the line that made them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NUM_CALLERS = 4
SHOWN = ("benchmarks/", "draftline/", "inductor")
"""Parts of the names of files whose lines are told; compiled code lies in a folder of Inductor's."""


@contextmanager
def watched(device: torch.device, out: Path) -> Iterator[None]:
    """Record every allocation on a CUDA device, and write what lived at the peak to `out`."""
    torch.cuda.memory._record_memory_history(max_entries=10_000_000, stacks="python")
    try:
        yield
        trace = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table(trace), encoding="utf-8")


def at_peak(trace: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The allocations of a trace that live when their sum is largest, for the first time."""
    live: dict[int, dict[str, Any]] = {}
    used = peak = 0
    best: list[dict[str, Any]] = []
    grown = False
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            used += entry["size"]
            grown = grown or used > peak
            peak = max(peak, used)
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            if grown:  # memory shrinks from a new peak: what lives now is what made it
                best, grown = list(live.values()), False
            used -= live.pop(entry["addr"])["size"]
    return list(live.values()) if grown else best


def table(trace: Sequence[dict[str, Any]]) -> str:
    """Lines of the peak, the largest first: how many, MiB of each, and where they were made."""
    alike = Counter((entry["size"], place_of(entry)) for entry in at_peak(trace))
    total = sum(size * count for (size, _), count in alike.items())
    lines = [f"{total / 2**30:9.3f} GiB at the peak; {' '.join(['python', *sys.argv])}"]
    ordered = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])
    lines += [f"{count:4d} x {size / 2**20:9.1f} MiB  {place}" for (size, place), count in ordered]
    return "\n".join(lines) + "\n"


def place_of(entry: dict[str, Any]) -> str:
    """The innermost lines of this project, and of what was compiled of it, that led to an allocation."""
    frames = [frame for frame in entry.get("frames", ()) if any(part in frame["filename"] for part in SHOWN)]
    return " < ".join(
        f"{Path(frame['filename']).name}:{frame['line']}:{frame['name']}" for frame in frames[:NUM_CALLERS]
    )
