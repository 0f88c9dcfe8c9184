"""How fast rows are built: tokens a second, without and with attention tables, and how full the rows are.

    python benchmarks/loader.py [--json FILE]

Documents are random, 200 to 2000 tokens, the last 60 % of each supervised, all in memory: the figure is the
row builder's, not the disk's. Rows are built by one thread and by two, as loader workers do.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch

from draftline.data.document import Document
from draftline.data.packing import RowIndex
from draftline.data.rows import RowShape, RowSource

NUM_DOCUMENTS = 20_000
NUM_ROWS = 1_000
SHAPE = RowShape(
    token_budget=4096,
    block_budget=512,
    block_size=16,
    anchors_per_document=512,
    decay_gamma=7.0,
    windows=(),
)


class MemoryStore:
    """Documents cut from one long array, as a memory-mapped store gives them."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self._ends = np.cumsum(lengths)
        self._input_ids = np.arange(self._ends[-1], dtype=np.int32) % 150_000

    def document(self, index: int, /) -> Document:
        length = self.lengths[index]
        input_ids = self._input_ids[self._ends[index] - length : self._ends[index]]
        return Document(input_ids, np.arange(length) >= 0.4 * length)


def measure(source: RowSource, num_threads: int) -> tuple[float, float, float]:
    """Seconds to build NUM_ROWS rows, CPU seconds of them, and tokens that they hold."""
    source.row(NUM_ROWS)  # packs the windows, which `main` has measured
    start, cpu_start = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(num_threads) as pool:
        tokens = sum(pool.map(lambda index: source.row(index).starts[-1], range(NUM_ROWS)))
    return time.perf_counter() - start, time.process_time() - cpu_start, tokens


def fills() -> dict[str, float]:
    """How full rows of 4096 tokens are, for length mixes of several kinds of data and of different size."""
    draw = np.random.default_rng(0)
    log_normal = {
        "chat": (6.5, 0.8, 100_000),
        "mixed": (6.0, 1.2, 100_000),
        "reasoning": (7.3, 0.6, 100_000),
        "chat, 400 documents": (6.5, 0.8, 400),
    }
    mixes = {
        name: np.clip(draw.lognormal(mean, sigma, count), 20, 4096)
        for name, (mean, sigma, count) in log_normal.items()
    }
    mixes["texts of Python's reference"] = np.array(
        [min(4096, len(text) // 4 + 1) for text in topics.topics.values()]
    )
    return {name: fill(lengths.astype(np.int32)) for name, lengths in mixes.items()}


def fill(lengths: np.ndarray) -> float:
    """Tokens of one pass over the room of its rows."""
    rows = RowIndex(lengths, SHAPE.token_budget, seed=0).rows_in(1.0)
    return float(lengths.sum() / (rows * SHAPE.token_budget))


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    out = parser.parse_args().json
    torch.set_num_threads(1)
    store = MemoryStore(np.random.default_rng(0).integers(200, 2001, NUM_DOCUMENTS, dtype=np.int32))
    start = time.process_time()
    num_rows = RowSource(store, SHAPE, seed=0).rows_in(1.0)
    packing = (time.process_time() - start) / NUM_DOCUMENTS
    result: dict[str, Any] = {
        "command": "python benchmarks/loader.py",
        "cores": len(os.sched_getaffinity(0)),
        "packing_us_per_document": round(packing * 1e6, 2),
        "fill": {"200 to 2000 tokens": round(fill(store.lengths), 4)},
        "million_tokens_per_s": {},
    }
    print(f"packing: {packing * 1e6:.2f} us a document, {num_rows} rows in a pass")
    result["fill"] |= {name: round(share, 4) for name, share in fills().items()}
    for name, share in result["fill"].items():
        print(f"{share:.2%} full: {name}")

    cases = {
        "no tables": (),
        "full": ((None, False),),
        "full + sliding": ((None, False), (2048, True)),
    }
    for name, windows in cases.items():
        source = RowSource(store, replace(SHAPE, windows=windows), seed=0)
        for num_threads in (1, 2):
            seconds, cpu_seconds, tokens = measure(source, num_threads)
            wall, cpu = tokens / seconds / 1e6, tokens / cpu_seconds / 1e6
            result["million_tokens_per_s"][f"{name}, {num_threads} threads"] = {
                "wall": round(wall, 2),
                "per_cpu_second": round(cpu, 2),
            }
            print(
                f"{name:15s} {num_threads} threads: {wall:5.2f} M tokens/s, {cpu:5.2f} M tokens per CPU second"
            )
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
