"""A long run in one process: memory, threads, file descriptors and disk must stay flat.

    python -m tests.faults.soak --minutes 30 --json benchmarks/results/NAME.json

Trains the builtin target without end, with checkpoints and evaluations every few steps, and samples the process.
Flat means: between the first and the last third of the samples the median of each figure differs by less than its
limit. Resident memory alone cannot tell a leak from an allocator that keeps what threads have freed, so what malloc has
handed out is sampled too, and at the end what it gives back when it is asked to.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from draftline.errors import Interrupted
from tests.faults.real_runs import metrics_of, settings, train_here

SAMPLE_S = 5.0
WARM_UP = 0.1
"""Share of the samples at the start that do not count."""
LIMITS = {"rss_mib": 24.0, "allocated_mib": 4.0, "threads": 0.5, "descriptors": 0.5, "checkpoint_mib": 3.0}
"""Most that a figure may differ between the first and the last third; 3 MiB are two checkpoints (the best one and
the one being written)."""


@dataclass(frozen=True)
class Sample:
    """The process at one moment."""

    rss_mib: float
    allocated_mib: float
    """What malloc has handed out, in all its arenas."""
    threads: int
    descriptors: int
    checkpoint_mib: float


class MallInfo(ctypes.Structure):
    """glibc's mallinfo2, sums over all arenas in bytes."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = MallInfo


def allocated_mib() -> float:
    found = LIBC.mallinfo2()
    return (found.uordblks + found.hblkhd) / 2**20


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def returned_by_trim_mib() -> float:
    """Resident memory that the allocator held on to."""
    before = rss_mib()
    LIBC.malloc_trim(0)
    return before - rss_mib()


def commit() -> str:
    """Of the source that ran, marked when it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    ).stdout.strip()


def sample(output: Path) -> Sample:
    return Sample(
        rss_mib=rss_mib(),
        allocated_mib=allocated_mib(),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        checkpoint_mib=size_of(output / "checkpoints") / 2**20,
    )


def size_of(folder: Path) -> int:
    """Bytes below a folder, while its files come and go."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def soak(seconds: float, output: Path) -> tuple[list[Sample], int]:
    """Samples of a run that is told to stop after some time, and its steps."""
    samples: list[Sample] = []

    def watch() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(SAMPLE_S)
            samples.append(sample(output))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="soak").start()
    flags = settings(
        output,
        2,
        2,
        optim__steps=1_000_000,
        checkpoint__every=5,
        data__eval_path="builtin:demo",
        evaluation__every=20,
        evaluation__num_prompts=2,
        evaluation__max_new_tokens=16,
    )
    with suppress(Interrupted):
        train_here(flags)
    return samples, len(metrics_of(output))


def drift(samples: list[Sample], figure: Callable[[Sample], float]) -> tuple[float, float]:
    """Medians of the first and the last third."""
    values = [figure(one) for one in samples[int(WARM_UP * len(samples)) :]]
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, steps = soak(60 * arguments.minutes, Path(folder) / "run")
    figures: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        first, last = drift(samples, lambda one, name=name: getattr(one, name))
        figures[name] = {
            "first_third": first,
            "last_third": last,
            "limit": limit,
            "flat": abs(last - first) <= limit,
        }
    outcome = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": f"python -m tests.faults.soak --minutes {arguments.minutes:g}",
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()}",
        "torch": torch.__version__,
        "steps": steps,
        "samples": len(samples),
        **figures,
        "returned_by_trim_mib": returned_by_trim_mib(),
    }
    print(json.dumps(outcome, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 0 if all(figure["flat"] for figure in figures.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
