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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from embedded_models import build_hybrid, build_tiny, build_tokenizer
from embedded_training import RECIPES, generate_corpus, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftline.embedded import DEMO_TASKS
from draftline.embedded.grammar import TASKS, Split, sample, task_at

PACKAGE_FOLDER = Path(__file__).resolve().parents[1] / "src" / "draftline" / "embedded"
DATA_SEED, TEST_SEED = 2, 3
MAX_ANSWER = 144
"""Tokens; no answer of the grammar is longer."""


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


def make_data(out: Path, device: torch.device) -> None:
    """Write the target's own answers to training prompts, and test prompts without answers: of all tasks, and
    of the few that the demo learns in a minute."""
    model = AutoModelForCausalLM.from_pretrained(out / "tiny", dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "tiny")
    everything = tuple(task.name for task in TASKS)
    for prefix, tasks, num_drawn, num_held_out in (
        ("", everything, 2_000, 200),
        ("demo_", DEMO_TASKS, 1_200, 60),
    ):
        drawn = islice(prompts(DATA_SEED, "train", tasks), num_drawn)
        asked = list(dict.fromkeys(prompt for prompt, _ in drawn))
        write_conversations(out / f"{prefix}conversations.jsonl.gz", model, tokenizer, asked)
        held_out = islice(prompts(TEST_SEED, "test", tasks), num_held_out)
        lines = "".join(
            json.dumps({"messages": [turn("user", p)], "task": task}) + "\n" for p, task in held_out
        )
        (out / f"{prefix}test_prompts.jsonl").write_text(lines, encoding="utf-8")


def prompts(seed: int, split: Split, tasks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Endless prompts of the given tasks, each with its task's name."""
    for index in count():
        name = task_at(index).name
        if name in tasks:
            yield sample(seed, index, split)[0], name


def write_conversations(path: Path, model: Any, tokenizer: Any, asked: list[str]) -> None:
    """Ask the target and keep the answers that ended and tokenise back to the ids it wrote."""
    kept, dropped = [], Counter()
    for prompt, ids in zip(asked, greedy_answers(model, tokenizer, asked), strict=True):
        text = tokenizer.decode(ids[:-1])
        if ids[-1] != tokenizer.eos_token_id:
            dropped["did not end"] += 1
        elif tokenizer.encode(text, add_special_tokens=False) != ids[:-1]:
            dropped["does not tokenise back to the same ids"] += 1
        else:
            kept.append({"messages": [turn("user", prompt), turn("assistant", text)]})
    print(f"{path.name}: {len(kept)} conversations kept; dropped: {dict(dropped)}")
    lines = "".join(json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in kept)
    # mtime=0: the same conversations give the same bytes.
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


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
    parser.add_argument("--out", type=Path, default=PACKAGE_FOLDER)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.what == "data":
        make_data(arguments.out, device)
    else:
        make_target(arguments.what, arguments.out, device, arguments.seconds)


if __name__ == "__main__":
    main()
