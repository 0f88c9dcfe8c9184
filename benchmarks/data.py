"""How fast `draftline prepare` is, how much memory it takes, and how fast a store is read.

    python benchmarks/data.py [rows] [--json FILE]

Rows are chats of one to three turns cut from the reference texts that come with Python, about 400 tokens each
by a byte-level BPE of 8,000 entries trained on the same texts. Memory is the peak of this process and of its
workers, for a source and for one five times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.store import open_store

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
WORDS = " ".join(topics.topics.values()).split()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML control tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(topics.topics.values(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_rows(path: Path, count: int) -> None:
    """Chats of random length, always the same for the same count."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            messages = []
            for _ in range(draw.randint(1, 3)):
                for role, longest in (("user", 60), ("assistant", 250)):
                    at, length = draw.randrange(len(WORDS) - longest), draw.randint(5, longest)
                    messages.append({"role": role, "content": " ".join(WORDS[at : at + length])})
            stream.write(json.dumps({"messages": messages}) + "\n")


def peak_mib(who: int) -> float:
    """Most memory that this process or any of its children has had, MiB."""
    return resource.getrusage(who).ru_maxrss / 1024


def measure(source: Path, store: Path, tokenizer: PreTrainedTokenizerFast, workers: int) -> dict[str, Any]:
    """Prepare once, print and return what it took. CPU seconds hold those of the workers."""
    start, cpu = time.perf_counter(), cpu_seconds()
    report = prepare(source, tokenizer, store, PrepareOptions(workers=workers))
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    took = {
        "processes": workers,
        "rows": report.rows,
        "tokens": report.tokens,
        "mib": round(source.stat().st_size / 2**20, 1),
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "tokens_per_wall_s": round(report.tokens / wall),
        "tokens_per_cpu_s": round(report.tokens / cpu),
        "peak_mib": round(peak_mib(resource.RUSAGE_SELF)),
        "peak_worker_mib": round(peak_mib(resource.RUSAGE_CHILDREN)),
    }
    print(took)
    return took


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Time one process, all cores, an unchanged second run, opening and reading."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="?", default=10_000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    count = asked.rows
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in (count, 5 * count):
            write_rows(folder / f"{rows}.jsonl", rows)
        runs = [
            measure(folder / f"{count}.jsonl", folder / "one", tokenizer, 1),
            measure(folder / f"{5 * count}.jsonl", folder / "one-long", tokenizer, 1),
            measure(folder / f"{5 * count}.jsonl", folder / "all", tokenizer, cores),
        ]
        start = time.perf_counter()
        prepare(folder / f"{5 * count}.jsonl", tokenizer, folder / "all")
        unchanged = time.perf_counter() - start
        start = time.perf_counter()
        store = open_store(folder / "all")
        opening = time.perf_counter() - start
        start = cpu_seconds()
        tokens = sum(len(store.document(number)) for number in range(len(store)))
        reading = max(cpu_seconds() - start, 0.01)
        result = {
            "command": f"python benchmarks/data.py {count}",
            "cores": cores,
            "prepare": runs,
            "unchanged_second_run_s": round(unchanged, 2),
            "open_and_verify_s": round(opening, 2),
            "read_tokens_per_cpu_s": round(tokens / reading),
        }
    print({name: value for name, value in result.items() if name != "prepare"})
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
