"""Corpus and training of the embedded targets (see make_embedded.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from typing import Any

import numpy as np
import torch
from embedded_models import TURN_END, TURN_START
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from draftline.embedded.grammar import sample

FIRST_ROW_SEED = 1_000
ROWS_PER_JOB = 2_000


@dataclass(frozen=True)
class Recipe:
    """How one target is trained on one kind of device."""

    row_tokens: int
    batch: int
    rows: int
    """Rows generated before training; they are used again when the time allows more steps."""
    learning_rate: float
    precision: torch.dtype
    """Of the matrix products; weights are float32 until they are saved."""
    seconds: float
    """Time for the optimizer steps."""


RECIPES = {
    ("tiny", "cuda"): Recipe(
        256, 512, rows=200_000, learning_rate=3e-3, precision=torch.bfloat16, seconds=90
    ),
    ("tiny", "cpu"): Recipe(128, 8, rows=4_000, learning_rate=3e-3, precision=torch.float32, seconds=600),
    ("hybrid", "cuda"): Recipe(
        128, 512, rows=150_000, learning_rate=4e-3, precision=torch.float32, seconds=50
    ),
    ("hybrid", "cpu"): Recipe(128, 8, rows=4_000, learning_rate=4e-3, precision=torch.float32, seconds=300),
}


def make_rows(job: tuple[str, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of whole conversations, several exchanges each, cut at the row's end.

    Returns ids int16 [rows, row_tokens] and supervised bool [rows, row_tokens] (the assistant's words).
    """
    tokenizer_json, seed, rows, row_tokens = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    newline = tokenizer.encode("\n").ids
    # Enough, since an exchange has 79 tokens on average and only a row's last one is cut.
    exchanges = rows * row_tokens // 50
    order = list(range(exchanges))
    Random(seed).shuffle(order)
    pairs = [sample(seed, index, "train") for index in order]
    asked = tokenizer.encode_batch_fast(
        [f"{TURN_START}user\n{p}{TURN_END}\n{TURN_START}assistant\n" for p, _ in pairs]
    )
    answered = tokenizer.encode_batch_fast([f"{a}{TURN_END}" for _, a in pairs])
    turns = [(q.ids, a.ids + newline) for q, a in zip(asked, answered, strict=True)]
    return pack(iter(turns), rows, row_tokens)


def pack(
    turns: Iterator[tuple[list[int], list[int]]], rows: int, row_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay exchanges one after another; each row starts with a new exchange."""
    ids = np.zeros((rows, row_tokens), np.int16)
    supervised = np.zeros((rows, row_tokens), bool)
    for row in range(rows):
        filled = 0
        while filled < row_tokens:
            question, answer = next(turns)
            tokens = (question + answer)[: row_tokens - filled]
            ids[row, filled : filled + len(tokens)] = tokens
            # The newline after the end of turn is written by the template, not by the assistant.
            supervised[row, filled + len(question) : filled + len(question) + len(answer) - 1] = True
            filled += len(tokens)
    return ids, supervised


def generate_corpus(tokenizer_json: str, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """All rows, made by every core. Returns ids int16 and supervised bool, [rows, row_tokens]."""
    jobs = [
        (tokenizer_json, FIRST_ROW_SEED + job, ROWS_PER_JOB, recipe.row_tokens)
        for job in range(recipe.rows // ROWS_PER_JOB)
    ]
    # Forked workers need no second import of torch; they never touch a GPU.
    with get_context("fork").Pool(os.cpu_count()) as pool:
        parts = pool.map(make_rows, jobs, chunksize=1)
    ids, supervised = (np.concatenate(column) for column in zip(*parts, strict=True))
    return torch.from_numpy(ids), torch.from_numpy(supervised)


def train(
    model: Any, corpus: tuple[Tensor, Tensor], recipe: Recipe, seconds: float, device: torch.device
) -> None:
    """AdamW for a given time; the learning rate rises quickly and falls linearly to zero with it."""
    ids, supervised = (tensor.to(device) for tensor in corpus)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.05, fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(0)
    start, step, used = time.monotonic(), 0, 0.0
    while used < 1.0:
        warmup = min(1.0, used / 0.03)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * warmup * (1.0 - used)
        picked = torch.randint(len(ids), (recipe.batch,), device=device, generator=generator)
        loss = batch_loss(model, ids[picked].long(), supervised[picked], recipe.precision)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            rate = step * recipe.batch * recipe.row_tokens / (time.monotonic() - start)
            print(f"step {step:5d}  loss {loss.item():.4f}  {rate:,.0f} tokens/s", flush=True)
        step += 1
        used = (time.monotonic() - start) / seconds
    print(f"trained {step} steps of {recipe.batch} x {recipe.row_tokens} tokens", flush=True)


def batch_loss(model: Any, ids: Tensor, supervised: Tensor, precision: torch.dtype) -> Tensor:
    """Mean cross-entropy of the assistant's tokens; ids [rows, tokens]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    labels = ids[:, 1:].masked_fill(~supervised[:, 1:], -100)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
