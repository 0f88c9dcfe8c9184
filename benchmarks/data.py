"""How fast `draftline prepare` is, how much memory it takes, and how fast a store is read.

    python benchmarks/data.py [rows]

Rows are chats of one to three turns cut from the reference texts that come with Python, about 400 tokens each
by a byte-level BPE of 8,000 entries trained on the same texts. One process is timed in CPU seconds, all cores in
wall seconds. Memory is the peak of this process and of its workers, for a source and for one five times as long.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data import topics

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


def measure(source: Path, store: Path, tokenizer: PreTrainedTokenizerFast, workers: int) -> None:
    """Prepare once and print what it took."""
    start, cpu = time.perf_counter(), time.process_time()
    report = prepare(source, tokenizer, store, PrepareOptions(workers=workers))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    seconds, kind = (cpu, "CPU s") if workers == 1 else (wall, "wall s")
    print(
        f"{workers:2d} process(es)  {report.rows:8,} rows  {report.tokens:11,} tokens  {seconds:7.1f} {kind}  "
        f"{report.tokens / seconds:10,.0f} tokens/s  {source.stat().st_size / seconds / 2**20:5.1f} MiB/s  "
        f"peak {peak_mib(resource.RUSAGE_SELF):.0f} MiB, worker {peak_mib(resource.RUSAGE_CHILDREN):.0f} MiB"
    )


def main() -> None:
    """Time one process, all cores, an unchanged second run, opening and reading."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in (count, 5 * count):
            write_rows(folder / f"{rows}.jsonl", rows)
        measure(folder / f"{count}.jsonl", folder / "one", tokenizer, 1)
        measure(folder / f"{5 * count}.jsonl", folder / "one-long", tokenizer, 1)
        cores = len(os.sched_getaffinity(0))
        measure(folder / f"{5 * count}.jsonl", folder / "all", tokenizer, cores)
        start = time.perf_counter()
        prepare(folder / f"{5 * count}.jsonl", tokenizer, folder / "all")
        print(f"unchanged second run {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        store = open_store(folder / "all")
        opened = time.perf_counter()
        tokens = sum(len(store.document(number)) for number in range(len(store)))
        took = time.perf_counter() - opened
        print(
            f"store opened and verified in {opened - start:.2f} s; {len(store) / took:,.0f} documents/s, "
            f"{tokens / took:,.0f} tokens/s read"
        )


if __name__ == "__main__":
    main()
