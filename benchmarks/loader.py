"""How fast rows are built: tokens a second, without and with attention tables, and how full the rows are.

    python benchmarks/loader.py

Documents are random, 200 to 2000 tokens, the last 60 % of each supervised, all in memory: the figure is the
row builder's, not the disk's. Rows are built by one thread and by two, as loader workers do.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from draftline.data.document import Document
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


def main() -> None:
    torch.set_num_threads(1)
    store = MemoryStore(np.random.default_rng(0).integers(200, 2001, NUM_DOCUMENTS, dtype=np.int32))
    start = time.process_time()
    num_rows = RowSource(store, SHAPE, seed=0).rows_in(1.0)
    packing = (time.process_time() - start) / NUM_DOCUMENTS
    fill = store.lengths.sum() / (num_rows * SHAPE.token_budget)
    print(f"packing: {packing * 1e6:.2f} us a document, {num_rows} rows in a pass, {fill:.2%} full")

    cases = {
        "no tables": (),
        "full": ((None, False),),
        "full + sliding": ((None, False), (2048, True)),
    }
    for name, windows in cases.items():
        source = RowSource(store, replace(SHAPE, windows=windows), seed=0)
        for num_threads in (1, 2):
            seconds, cpu_seconds, tokens = measure(source, num_threads)
            print(
                f"{name:15s} {num_threads} threads: {tokens / seconds / 1e6:5.2f} M tokens/s, "
                f"{tokens / cpu_seconds / 1e6:5.2f} M tokens per CPU second"
            )


if __name__ == "__main__":
    main()
