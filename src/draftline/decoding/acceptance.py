"""Acceptance length (tau) from verify steps: definitions, pooling, confidence.

Published acceptance lengths differ in definition by up to 5 % on the same decoding. Here tau counts the
target's own token of each step, truncates the last block and pools all steps, as an engine's counters do;
tau_macro is the mean of per-prompt means that z-lab prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftline.errors import DataError

RESAMPLES = 1000
"""Bootstrap draws behind a confidence interval."""


@dataclass(frozen=True)
class Walk:
    """The verify steps of one answer."""

    produced: tuple[int, ...]
    """Tokens of each step, the last one cut at the end of the answer."""
    accepted: tuple[int, ...]
    """Drafts kept in each step."""


@dataclass(frozen=True)
class Acceptance:
    """How well drafts are accepted over some prompts."""

    tau: float
    """Tokens per verify step, the target's own token included, pooled over all steps."""
    tau_low: float
    tau_high: float
    """95 % confidence interval of tau, by resampling prompts."""
    tau_macro: float
    """Mean over prompts of each prompt's own tau (z-lab's figure)."""
    accept_pos: tuple[float, ...]
    """Share of steps in which at least 1, 2, ... B - 1 drafts were kept."""
    verify_steps: int
    tokens: int
    """Tokens that these steps produced."""
    prompts: int
    """Prompts whose answer has at least one verify step."""


def walk(runs: Sequence[int]) -> Walk:
    """The steps of an answer of n tokens, from the run of right drafts at each of its first n - 1 tokens."""
    produced: list[int] = []
    accepted: list[int] = []
    place = 0
    while place < len(runs):
        produced.append(min(runs[place] + 1, len(runs) - place))
        accepted.append(min(runs[place], produced[-1]))
        place += produced[-1]
    return Walk(tuple(produced), tuple(accepted))


def acceptance(walks: Sequence[Walk], slots: int, seed: int = 0) -> Acceptance:
    """Pool the steps of some answers.

    Args:
        slots: drafts of a block, B - 1.

    Raises:
        DataError: there is no verify step.
    """
    tokens = np.array([sum(walk.produced) for walk in walks if walk.produced])
    steps = np.array([len(walk.produced) for walk in walks if walk.produced])
    if len(steps) == 0:
        raise DataError(
            "no answer has two tokens, so there is no verify step to measure; raise max_new_tokens or use "
            "prompts that the target answers at more length"
        )
    kept = np.concatenate([walk.accepted for walk in walks])
    low, high = _confidence_interval(tokens, steps, seed)
    return Acceptance(
        tau=float(tokens.sum() / steps.sum()),
        tau_low=low,
        tau_high=high,
        tau_macro=float((tokens / steps).mean()),
        accept_pos=tuple(float((kept >= slot).mean()) for slot in range(1, slots + 1)),
        verify_steps=int(steps.sum()),
        tokens=int(tokens.sum()),
        prompts=len(steps),
    )


def _confidence_interval(tokens: np.ndarray, steps: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % interval of the pooled ratio. Prompts are resampled, not steps: those of one answer are alike."""
    draws = np.random.default_rng(seed).integers(0, len(steps), size=(RESAMPLES, len(steps)))
    taus = tokens[draws].sum(axis=1) / steps[draws].sum(axis=1)
    low, high = np.percentile(taus, [2.5, 97.5])
    return float(low), float(high)
