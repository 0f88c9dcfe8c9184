"""The demo's data for SmolLM2: the model's own greedy answers to prompts of this project's making."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftline.commands import answer_limit
from draftline.config import RunConfig
from draftline.console import Screen
from draftline.decoding.greedy import greedy_batch
from draftline.decoding.prompts import chat_prompt
from draftline.embedded.prompts import held_out_prompts, training_prompts
from draftline.pipeline.plan import available_devices
from draftline.smollm2.wheel import prepare_smollm2
from draftline.target.load import load_target

NUM_PROMPTS = 192
"""Training prompts that the target answers before training, about a minute on two cores."""
BATCH = 64


def with_own_answers(config: RunConfig, folder: Path, screen: Screen) -> RunConfig:
    """Fetch the target, let it answer, and point the run at the result; made once in `folder`, then reused.

    Raises:
        CheckpointError: the model could not be fetched or is not the expected one.
        DiskFullError: there is no room for it.
    """
    screen.say(f"fetching and converting SmolLM2-135M-Instruct into {folder} (once)")
    path = prepare_smollm2(folder)
    target = config.target.model_copy(update={"path": str(path)})
    config = config.model_copy(update={"target": target})
    training, held_out = folder / "answers.jsonl", folder / "prompts.jsonl"
    if not training.is_file():
        _write(held_out, ({"prompt": prompt} for prompt in held_out_prompts()))
        _write(training, _answers(config, screen))
    data = config.data.model_copy(update={"path": str(training), "eval_path": (str(held_out),)})
    return config.model_copy(update={"data": data})


def _answers(config: RunConfig, screen: Screen) -> list[dict[str, Any]]:
    """Token ids straight from the target, so that no re-tokenisation can change them."""
    target = load_target(config.target, available_devices()[0])
    limit = answer_limit(target, config.evaluation.max_new_tokens)
    prompts = [chat_prompt(target.tokenizer, text).input_ids for text in training_prompts()[:NUM_PROMPTS]]
    rows: list[dict[str, Any]] = []
    with screen.progress("answers", NUM_PROMPTS) as bar:
        for start in range(0, NUM_PROMPTS, BATCH):
            asked = prompts[start : start + BATCH]
            for prompt, answer in zip(asked, greedy_batch(target, asked, limit, BATCH), strict=True):
                mask = [0] * len(prompt) + [1] * len(answer)
                rows.append({"input_ids": [*prompt, *answer], "loss_mask": mask})
            bar.update(len(rows), f"{sum(sum(row['loss_mask']) for row in rows)} tokens")
    return rows


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write whole or not at all, so that a killed demo starts this part again."""
    temporary = path.with_suffix(".writing")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.rename(path)
