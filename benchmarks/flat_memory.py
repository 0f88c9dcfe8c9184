"""Whether memory stays flat over a very long source: prepare, open and read a store of millions of documents.

    python benchmarks/flat_memory.py [rows] [--json FILE]

Rows are short, ready token ids, so that the number of rows and not the tokenizer is what is tried; they go
through the same reading, parsing, hashing, counting and writing as any other, with all cores. Memory is that of
this process that is its own, sampled once for each tenth of the rows; `peak_mib` also counts the pages of the store
that are mapped to check and read it.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from draftline.data.prepare import PrepareOptions, Progress, prepare
from draftline.data.rows import RowShape, RowSource
from draftline.data.store import TokenStore, open_store
from draftline.embedded import embedded_path

ROWS = 10_000_000
SHAPE = RowShape(
    token_budget=4096, block_budget=512, block_size=16, anchors_per_document=512, decay_gamma=7.0, windows=()
)


@dataclass(frozen=True)
class Sample:
    """Memory when `rows` rows had been prepared."""

    rows: int
    resident_mib: float
    seconds: float


def resident_mib() -> float:
    """Memory of this process that is its own, MiB: resident less shared with files."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize() / 2**20


def write_rows(path: Path, count: int) -> None:
    """Rows of eight ids, all different, the last five supervised."""
    with path.open("w", encoding="ascii") as stream:
        for number in range(count):
            ids = [number >> shift & 255 for shift in (0, 8, 16, 24)] + [1, 2, 3, 4]
            stream.write(f'{{"input_ids":{ids},"loss_mask":[0,0,0,1,1,1,1,1]}}\n')


def prepare_sampled(source: Path, store: Path, count: int) -> list[Sample]:
    """Prepare, with a sample of the memory for each tenth of the rows."""
    samples: list[Sample] = []
    started = time.perf_counter()

    def watch(progress: Progress) -> None:
        if progress.rows * 10 >= count * (len(samples) + 1):
            samples.append(Sample(progress.rows, resident_mib(), time.perf_counter() - started))

    tokenizer = AutoTokenizer.from_pretrained(embedded_path("tiny"))
    prepare(source, tokenizer, store, PrepareOptions(), progress=watch)
    return samples


def read_rows(store: TokenStore) -> dict[str, Any]:
    """Memory and time of rows from all over a pass through the store."""
    before, started = resident_mib(), time.perf_counter()
    rows = RowSource(store, SHAPE, seed=0)
    tokens = sum(int(rows.row(number).starts[-1]) for number in range(1000))
    return {
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started, 2),
        "grown_mib": round(resident_mib() - before, 1),
    }


def main() -> None:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="?", default=ROWS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", asked.rows)
        samples = prepare_sampled(folder / "rows.jsonl", folder / "store", asked.rows)
        before = resident_mib()
        started = time.perf_counter()
        store = open_store(folder / "store")
        opened = {
            "seconds": round(time.perf_counter() - started, 2),
            "mib": round(resident_mib() - before, 1),
        }
        result = {
            "command": f"python benchmarks/flat_memory.py {asked.rows}",
            "rows": asked.rows,
            "bytes": (folder / "rows.jsonl").stat().st_size,
            "documents": len(store),
            "prepare": [asdict(sample) for sample in samples],
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "peak_worker_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
            "open": opened,
            "read": read_rows(store),
        }
    for sample in samples:
        print(f"{sample.rows:12,} rows  {sample.resident_mib:7.1f} MiB  {sample.seconds:7.1f} s")
    print({name: value for name, value in result.items() if name != "prepare"})
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
