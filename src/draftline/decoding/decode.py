"""Speculative decoding of one sequence: draft a block, verify it in one target pass, keep what agrees.

The loop is z-lab's `dflash_generate` (PyPI dflash 0.1.0) with blocks that are always whole, as in engines.
Greedy output is the target's own greedy output, token for token, up to ties within rounding. Works for every
target; with recurrent layers a partly rejected block costs a second target pass (see `CachedTarget`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftline.decoding.fixed import FixedBlockDrafter, FixedDecoding
from draftline.decoding.greedy import CachedTarget, Limit, SequenceInWork, prompt_tensor
from draftline.decoding.sampling import Choice, Greedy
from draftline.drafter.draft import BlockDrafter
from draftline.drafter.model import Drafter
from draftline.target.load import Target


@dataclass(frozen=True)
class Prefilled:
    """The prompt was read and gave the first token."""

    token: int
    seconds: float


@dataclass(frozen=True)
class Verified:
    """One step: a block was drafted and verified."""

    drafted: tuple[int, ...]
    """All B - 1 drafts."""
    accepted: int
    """Leading drafts that were kept."""
    produced: tuple[int, ...]
    """Tokens the step adds: accepted drafts and the target's own next token, cut where the answer ends."""
    draft_s: float
    verify_s: float


Event = Prefilled | Verified


@dataclass(frozen=True)
class Decoded:
    """A whole answer."""

    tokens: tuple[int, ...]
    """The answer; a stop token is its last."""
    produced: tuple[int, ...]
    """Tokens of each verify step, the last one cut at the limit or the stop token. Their sum is one less than
    the answer, whose first token comes from the prompt."""
    accepted: tuple[int, ...]
    """Drafts kept in each verify step."""
    prefill_s: float
    draft_s: float
    verify_s: float

    @property
    def tau(self) -> float:
        """Tokens per verify step, the target's own included; 0 without a step."""
        return sum(self.produced) / len(self.produced) if self.produced else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer per second, prompt reading included."""
        return len(self.tokens) / (self.prefill_s + self.draft_s + self.verify_s)


def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    limit: Limit,
    choice: Choice | None = None,
    fixed: FixedDecoding | None = None,
) -> Decoded:
    """The whole answer to a prompt; see `decode_events`."""
    return collect(decode_events(target, drafter, prompt, limit, choice, fixed))


def collect(events: Iterator[Event]) -> Decoded:
    """Add up the events of one decoding."""
    first, *steps = events
    assert isinstance(first, Prefilled)
    verified = [step for step in steps if isinstance(step, Verified)]
    tokens = [first.token, *(token for step in verified for token in step.produced)]
    return Decoded(
        tokens=tuple(tokens),
        produced=tuple(len(step.produced) for step in verified),
        accepted=tuple(step.accepted for step in verified),
        prefill_s=first.seconds,
        draft_s=sum(step.draft_s for step in verified),
        verify_s=sum(step.verify_s for step in verified),
    )


@torch.inference_mode()
def decode_events(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    limit: Limit,
    choice: Choice | None = None,
    fixed: FixedDecoding | None = None,
) -> Iterator[Event]:
    """Decode and tell every step as it happens.

    Args:
        prompt: token ids, at least one.
        limit: where the answer ends; at least one token is produced.
        choice: greedy when none is given; `sampling.Sampled` for a temperature.
        fixed: preallocated caches of this target and drafter; growing ones when none are given.

    Raises:
        DataError: the prompt is empty.
    """
    choice = choice or Greedy()
    if fixed is None:
        verifier = CachedTarget(target, drafter.spec.target_layer_ids)
        capacity = len(prompt) + limit.max_new_tokens
        block = BlockDrafter(drafter, target.embedding, target.head, capacity)
    else:
        fixed.reset()
        verifier, block = fixed.verifier, fixed.block
    start = time.perf_counter()
    fed = verifier.feed(prompt_tensor(prompt, target.device), num_logits=1)
    answer, taps = [choice.first(fed.logits[-1])], fed.taps
    yield Prefilled(answer[0], time.perf_counter() - start)

    while not limit.reached(answer):
        step, taps = _step(verifier, block, choice, taps, answer[-1])
        produced = tuple(limit.cut([*answer, *step.produced])[len(answer) :])
        yield replace(step, accepted=min(step.accepted, len(produced)), produced=produced)
        answer.extend(produced)


def _step(
    verifier: SequenceInWork,
    block: BlockDrafter | FixedBlockDrafter,
    choice: Choice,
    taps: Tensor,
    anchor: int,
) -> tuple[Verified, Tensor]:
    """One draft and one verification; also the taps [accepted + 1, K*D] of the tokens that were committed."""
    start = time.perf_counter()
    block.observe(taps)
    drafts = choice.propose(block.logits(anchor))
    drafted = tuple(drafts.tolist())  # also waits for the device, so that the two times are apart
    middle = time.perf_counter()
    fed = verifier.feed(torch.cat([drafts.new_tensor([anchor]), drafts]), num_logits=len(drafts) + 1)
    accepted, bonus = choice.verify(drafts, fed.logits)
    # The anchor and the accepted drafts stay; the bonus token has not been through the target yet.
    verifier.take_back(len(drafts) - accepted)
    end = time.perf_counter()
    step = Verified(drafted, accepted, (*drafted[:accepted], bonus), middle - start, end - middle)
    return step, fed.taps[: accepted + 1]
