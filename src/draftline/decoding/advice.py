"""Would this drafter pay, where, and with which block length? From measured acceptance and measured times.

A model, and called one wherever it is shown:

    speed-up(b) = tau(b) x plain / (draft + verify(b))

tau(b) is the acceptance length when only the first b - 1 drafts of each block are verified, walked again over the
measured drafts; plain and verify(b) are the measured times of a target pass over 1 and over b tokens; draft is the
measured time of drafting a block. Prompt reading is left out. Engines batch requests, and batches make
verification dearer: the gain shrinks as they fill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftline.decoding.evaluate import Comparison, Evaluation
from draftline.decoding.greedy import CachedTarget, SequenceInWork, prompt_tensor
from draftline.target.load import Target

REPEATS = 5
ENOUGH_STEPS = 1500
"""Verify steps below which two drafters of similar quality cannot be told apart."""
WIDE_GAP = 0.7
"""Acceptance of one mode or language, as a share of another's, below which training data should be looked at."""
WORTH = 1.05
"""Gain of another block length that is worth telling."""


@dataclass(frozen=True)
class Timings:
    """Milliseconds of the parts of decoding, one request at a time."""

    draft_ms: float
    """One block."""
    verify_ms: dict[int, float]
    """A target pass over so many tokens; 1 is plain decoding."""

    def speedup(self, tau: float, block_size: int) -> float:
        """Predicted speed-up over plain decoding at an acceptance length."""
        return tau * self.verify_ms[1] / (self.draft_ms + self.verify_ms[block_size])

    def break_even(self, block_size: int) -> float:
        """Acceptance length at which a drafter neither gains nor loses."""
        return (self.draft_ms + self.verify_ms[block_size]) / self.verify_ms[1]


@dataclass(frozen=True)
class Prediction:
    """Serving with blocks of this length."""

    block_size: int
    """Tokens verified in a step, the anchor included."""
    tau: float
    speedup: float
    """Over plain decoding, one request at a time."""


def block_sizes(trained: int) -> list[int]:
    """Block lengths that a drafter trained for `trained` is judged at."""
    return sorted({size for size in (2, 4, 8, 16, 32) if size < trained} | {trained})


def predict_speedups(evaluation: Evaluation, timings: Timings) -> tuple[Prediction, ...]:
    """Predicted speed-up at every block length that was timed."""
    taus = {size: evaluation.tau_by_drafts[size - 2] for size in timings.verify_ms if size > 1}
    return tuple(Prediction(size, tau, timings.speedup(tau, size)) for size, tau in taus.items())


@torch.inference_mode()
def time_steps(
    target: Target,
    prompt: Sequence[int],
    block_size: int,
    draft_ms: float,
    sequence: SequenceInWork | None = None,
) -> Timings:
    """Time target passes over one token and over blocks of several lengths behind a prompt; medians of a few.

    Args:
        sequence: empty, of this target; a growing cache when none is given.
    """
    sequence = sequence or CachedTarget(target)
    sequence.feed(prompt_tensor(prompt, target.device), num_logits=1)
    verify_ms: dict[int, float] = {}
    for size in [1, *block_sizes(block_size)]:
        tokens = torch.full((size,), prompt[-1], dtype=torch.int64, device=target.device)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            int(sequence.feed(tokens, num_logits=size).logits.argmax())  # waits for the device
            times.append(time.perf_counter() - start)
            sequence.take_back(size)
        verify_ms[size] = 1000 * statistics.median(times)
    return Timings(draft_ms, verify_ms)


def warnings(
    evaluation: Evaluation, compared: Comparison | None, timings: Timings | None, *, recurrent: bool
) -> tuple[str, ...]:
    """Reasons not to serve this drafter, or not to believe its figures; none when all is well."""
    found: list[str] = []
    if compared is not None:
        found += _about_decoding(compared, recurrent=recurrent)
    if timings is not None:
        found += _about_slices(evaluation, timings) + _about_lengths(evaluation, timings)
    found += _about_gaps(evaluation)
    if evaluation.overall.verify_steps < ENOUGH_STEPS:
        found.append(
            f"tau rests on {evaluation.overall.verify_steps} verify steps (95 % interval "
            f"{evaluation.overall.tau_low:.2f} to {evaluation.overall.tau_high:.2f}); compare drafters on "
            f"{ENOUGH_STEPS} or more"
        )
    return tuple(found)


def _about_decoding(compared: Comparison, *, recurrent: bool) -> list[str]:
    found = []
    if recurrent:
        found.append(
            "this target keeps a running state, which Draftline's decoder restores by a second target pass: its "
            "measured speed says nothing about an engine; the predictions do not count that pass"
        )
    elif compared.speedup < 1:
        step = (compared.draft_ms + compared.verify_ms) / (1000 / compared.plain_tokens_per_s)
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
    return found


def _about_slices(evaluation: Evaluation, timings: Timings) -> list[str]:
    size = len(evaluation.tau_by_drafts) + 1
    poor = [
        f"{name} ({found.tau:.2f})"
        for name, found in evaluation.slices.items()
        if timings.speedup(found.tau, size) < 1
    ]
    if not poor:
        return []
    return [
        f"it would not pay on {', '.join(poor)}: a step costs {timings.break_even(size):.2f} plain tokens, so tau "
        "must be higher than that; add answers of that kind to the training data"
    ]


def _about_lengths(evaluation: Evaluation, timings: Timings) -> list[str]:
    predicted = predict_speedups(evaluation, timings)
    best, trained = max(predicted, key=lambda each: each.speedup), predicted[-1]
    if best.speedup < WORTH * trained.speedup:
        return []
    return [
        f"blocks of {best.block_size} should be faster here than the trained {trained.block_size} "
        f"({best.speedup:.2f}x against {trained.speedup:.2f}x): verify fewer drafts when serving one request at a "
        "time on this device"
    ]


def _about_gaps(evaluation: Evaluation) -> list[str]:
    found = []
    for kind in ("mode", "language"):
        members = {n: a.tau for n, a in evaluation.slices.items() if n.startswith(f"{kind}/")}
        if len(members) < 2:
            continue
        low, high = min(members, key=members.__getitem__), max(members, key=members.__getitem__)
        if members[low] < WIDE_GAP * members[high]:
            found.append(
                f"acceptance depends on the {kind}: {low} {members[low]:.2f}, {high} {members[high]:.2f}; train on "
                "answers of both"
            )
    return found
