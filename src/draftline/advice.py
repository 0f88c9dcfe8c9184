"""Would this drafter pay, and with which block length? From measured acceptance and measured times.

A model, and called one wherever it is shown: speed-up = tokens per step x time of a plain token / time of a step.
Verification is timed at each length on the device at hand; acceptance at shorter lengths is that of the same
drafts cut short. Engines batch, and batches make verification dearer: the gain shrinks as they fill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftline.evaluate import Comparison, Evaluation
from draftline.greedy import CachedTarget, prompt_tensor
from draftline.target.load import Target

REPEATS = 5
ENOUGH_STEPS = 1500
"""Verify steps below which two drafters of similar quality cannot be told apart."""


@dataclass(frozen=True)
class Prediction:
    """Serving with blocks of this length."""

    block_size: int
    """Tokens verified in a step, the anchor included."""
    tau: float
    speedup: float
    """Over plain decoding, one request at a time."""


def predict_speedups(
    target: Target, evaluation: Evaluation, compared: Comparison, prompt: Sequence[int]
) -> tuple[Prediction, ...]:
    """Predicted speed-up at block lengths 2, 4, ... and the trained one.

    Args:
        evaluation: acceptance of the drafter.
        compared: measured times of the same drafter and target.
        prompt: context behind which verification is timed.
    """
    trained = len(evaluation.tau_by_drafts) + 1
    sizes = sorted({size for size in (2, 4, 8, 16, 32) if size < trained} | {trained})
    verify_s = _time_verification(target, prompt, [1, *sizes])
    draft_s = compared.draft_ms / 1000
    taus = [evaluation.tau_by_drafts[size - 2] for size in sizes]
    return tuple(
        Prediction(size, tau, tau * verify_s[1] / (draft_s + verify_s[size]))
        for size, tau in zip(sizes, taus, strict=True)
    )


@torch.inference_mode()
def _time_verification(target: Target, prompt: Sequence[int], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of a target pass over so many tokens after a prompt; the median of a few."""
    sequence = CachedTarget(target)
    sequence.feed(prompt_tensor(prompt, target.device), num_logits=1)
    seconds: dict[int, float] = {}
    for size in sizes:
        tokens = torch.full((size,), prompt[-1], dtype=torch.int64, device=target.device)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            int(sequence.feed(tokens, num_logits=size).logits.argmax())  # waits for the device
            times.append(time.perf_counter() - start)
            sequence.take_back(size)
        seconds[size] = statistics.median(times)
    return seconds


def warnings(evaluation: Evaluation, compared: Comparison) -> tuple[str, ...]:
    """Reasons not to serve this drafter, or not to believe its figures; none when all is well."""
    found = []
    if compared.speedup < 1:
        plain_ms = 1000 / compared.plain_tokens_per_s
        step = (compared.draft_ms + compared.verify_ms) / plain_ms
        found.append(
            f"decoding is slower with this drafter ({compared.speedup:.2f}x): a step costs {step:.1f} plain "
            f"tokens and gives {compared.tau:.2f}; train longer, on more answers of this target, or use fewer "
            "layers"
        )
    if compared.identical < compared.prompts:
        found.append(
            f"{compared.prompts - compared.identical} of {compared.prompts} answers differ from plain greedy "
            "decoding: expected in bfloat16, where near-equal logits swap with the shape of the batch; in "
            "float32 it would be a defect"
        )
    if evaluation.overall.verify_steps < ENOUGH_STEPS:
        found.append(
            f"tau rests on {evaluation.overall.verify_steps} verify steps (95 % interval "
            f"{evaluation.overall.tau_low:.2f} to {evaluation.overall.tau_high:.2f}); compare drafters on "
            f"{ENOUGH_STEPS} or more"
        )
    return tuple(found)
