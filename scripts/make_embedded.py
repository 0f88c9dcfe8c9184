"""Makes what the package embeds: two small targets and the conversations they wrote.

    python scripts/make_embedded.py tiny --device cuda      # full attention, 1.6 M parameters
    python scripts/make_embedded.py hybrid --device cuda    # gated delta rule and full attention
    python scripts/make_embedded.py data --device cuda      # answers of `tiny` to training prompts

Needs torch, transformers, tokenizers, safetensors and numpy, no network. Each writes below `--out`, by
default the package's own folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

from draftline.embedded.grammar import TASKS, sample, task_at  # noqa: E402

PAD, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
VOCABULARY = 512
ROPE_THETA = 10_000.0
TOKENIZER_SEED, DATA_SEED, TEST_SEED = 1, 2, 3
FIRST_ROW_SEED = 1_000
MAX_ANSWER = 144
"""Tokens; no answer of the grammar is longer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """How one target is trained on one kind of device."""

    row_tokens: int
    batch: int
    rows: int
    """Rows generated before training; they are used again when the time allows more steps."""
    learning_rate: float
    seconds: float
    """Time for the optimizer steps."""


RECIPES = {
    ("tiny", "cuda"): Recipe(row_tokens=256, batch=512, rows=400_000, learning_rate=3e-3, seconds=100),
    ("tiny", "cpu"): Recipe(row_tokens=128, batch=8, rows=4_000, learning_rate=3e-3, seconds=600),
    ("hybrid", "cuda"): Recipe(row_tokens=128, batch=512, rows=200_000, learning_rate=4e-3, seconds=60),
    ("hybrid", "cpu"): Recipe(row_tokens=128, batch=8, rows=4_000, learning_rate=4e-3, seconds=300),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from the grammar; single digits, so that sums can be carried."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, TURN_START, TURN_END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for index in range(20_000) for text in sample(TOKENIZER_SEED, index, "train"))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_tiny(special: dict[str, int]) -> Qwen3ForCausalLM:
    """Eight layers, so that the published rule for taps gives distinct ones."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        **special,
    )
    return Qwen3ForCausalLM(config)


def build_hybrid(special: dict[str, int]) -> Qwen3_5ForCausalLM:
    """Every fourth layer has full attention, the others the gated delta rule."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=80,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        **special,
    )
    return Qwen3_5ForCausalLM(config)


def make_rows(job: tuple[str, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of whole conversations, several exchanges each, cut at the row's end.

    Returns ids int16 [rows, row_tokens] and supervised bool [rows, row_tokens] (the assistant's words).
    """
    tokenizer_json, seed, rows, row_tokens = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    newline = tokenizer.encode("\n").ids
    exchanges = rows * row_tokens // 50  # An exchange has 79 tokens on average, and rows cut their last one.
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
    turns: Iterable[tuple[list[int], list[int]]], rows: int, row_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay exchanges one after another; each row starts with a new exchange."""
    ids = np.zeros((rows, row_tokens), np.int16)
    supervised = np.zeros((rows, row_tokens), bool)
    supply = iter(turns)
    for row in range(rows):
        filled = 0
        while filled < row_tokens:
            question, answer = next(supply)
            tokens = (question + answer)[: row_tokens - filled]
            ids[row, filled : filled + len(tokens)] = tokens
            # The newline after the end of turn is written by the template, not by the assistant.
            supervised[row, filled + len(question) : filled + len(question) + len(answer) - 1] = True
            filled += len(tokens)
    return ids, supervised


def generate_corpus(tokenizer_json: str, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """All rows, made by every core. Returns ids int16 and supervised bool, [rows, row_tokens]."""
    chunk = 2_000
    jobs = [
        (tokenizer_json, FIRST_ROW_SEED + number, chunk, recipe.row_tokens)
        for number in range(recipe.rows // chunk)
    ]
    # Forked workers need no second import of torch; they never touch a GPU.
    with get_context("fork").Pool(os.cpu_count()) as pool:
        parts = pool.map(make_rows, jobs, chunksize=1)
    return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))


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
        loss = batch_loss(model, ids[picked].long(), supervised[picked])
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


def batch_loss(model: Any, ids: Tensor, supervised: Tensor) -> Tensor:
    """Mean cross-entropy of the assistant's tokens; ids [rows, tokens]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    labels = ids[:, 1:].masked_fill(~supervised[:, 1:], -100)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def greedy_answers(model: Any, tokenizer: Any, prompts: Sequence[str], batch: int = 250) -> list[list[int]]:
    """Token ids of the greedy answer to each prompt, the end of turn included when it was reached."""
    tokenizer.padding_side = "left"
    answers: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for first in range(0, len(prompts), batch):
        numbers = by_length[first : first + batch]
        chats = [[{"role": "user", "content": prompts[number]}] for number in numbers]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        width = inputs["input_ids"].shape[1]
        output = model.generate(**inputs, max_new_tokens=MAX_ANSWER, do_sample=False)
        for number, row in zip(numbers, output[:, width:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            answers[number] = row[:end]
    return answers


def report_quality(model: Any, tokenizer: Any, count: int) -> None:
    """Print the share of exactly right answers to unseen prompts, for each kind with one right answer."""
    pairs = [sample(TEST_SEED, index, "test") for index in range(count)]
    answers = greedy_answers(model, tokenizer, [prompt for prompt, _ in pairs])
    right, asked, ended = Counter(), Counter(), Counter()
    for index, ((_, expected), ids) in enumerate(zip(pairs, answers, strict=True)):
        name = task_at(index).name
        asked[name] += 1
        right[name] += tokenizer.decode(ids, skip_special_tokens=True) == expected
        ended[name] += ids[-1] == tokenizer.eos_token_id
    for task in TASKS:
        exact = (
            f"exact {right[task.name] / asked[task.name]:6.1%}" if task.is_deterministic else "free text    "
        )
        print(f"{task.name:10s} {exact}  ended {ended[task.name] / asked[task.name]:6.1%}")


def make_target(name: str, out: Path, device: torch.device, seconds: float | None) -> None:
    """Train one target and write its folder."""
    folder = out / name
    tokenizer = build_tokenizer()
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    recipe = RECIPES[name, device.type]
    start = time.monotonic()
    corpus = generate_corpus(tokenizer.backend_tokenizer.to_str(), recipe)
    print(f"{corpus[0].numel():,} tokens generated in {time.monotonic() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    model = {"tiny": build_tiny, "hybrid": build_hybrid}[name](special).to(device)
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, corpus, recipe, recipe.seconds if seconds is None else seconds, device)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_flat_rope_theta(folder / "config.json")
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    report_quality(
        saved, AutoTokenizer.from_pretrained(folder), count=1_000 if device.type == "cuda" else 100
    )


def add_flat_rope_theta(path: Path) -> None:
    """Engines older than `rope_parameters` read `rope_theta` at the top of config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_data(out: Path, device: torch.device, conversations: int, prompts: int) -> None:
    """Write the target's own answers to training prompts, and test prompts without answers."""
    model = AutoModelForCausalLM.from_pretrained(out / "tiny", dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "tiny")
    asked = list(dict.fromkeys(sample(DATA_SEED, index, "train")[0] for index in range(conversations)))
    kept, dropped = [], Counter()
    for prompt, ids in zip(asked, greedy_answers(model, tokenizer, asked), strict=True):
        text = tokenizer.decode(ids[:-1])
        if ids[-1] != tokenizer.eos_token_id:
            dropped["did not end"] += 1
        elif tokenizer.encode(text, add_special_tokens=False) != ids[:-1]:
            dropped["does not tokenise back to the same ids"] += 1
        else:
            kept.append({"messages": [turn("user", prompt), turn("assistant", text)]})
    print(f"{len(kept)} conversations kept; dropped: {dict(dropped)}")
    lines = "".join(json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in kept)
    # mtime=0: the same conversations give the same bytes.
    (out / "conversations.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    held_out = [(sample(TEST_SEED, index, "test")[0], task_at(index).name) for index in range(prompts)]
    lines = "".join(json.dumps({"messages": [turn("user", p)], "task": task}) + "\n" for p, task in held_out)
    (out / "test_prompts.jsonl").write_text(lines, encoding="utf-8")


def turn(role: str, content: str) -> dict[str, str]:
    """One message of a chat."""
    return {"role": role, "content": content}


def main() -> None:
    """Parse the command line and make what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tiny", "hybrid", "data"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="time for the steps; the recipe's own when left out")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "src" / "draftline" / "embedded")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.what == "data":
        make_data(arguments.out, device, conversations=2_000, prompts=200)
    else:
        make_target(arguments.what, arguments.out, device, arguments.seconds)


if __name__ == "__main__":
    main()
