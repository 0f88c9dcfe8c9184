"""Acceptance length (tau), exactly and without speculative decoding: replay.

The target's greedy answer is written once. One more pass over prompt and answer gives all taps; the drafter
then drafts at every answer token at once, and a walk that jumps by what would have been accepted visits the
very steps that the decoder takes (tests/test_decode_speculative.py). No cache is rolled back, so it is exact for
recurrent targets too, and an answer serves every later evaluation of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from draftline.decoding.acceptance import Acceptance, Walk, acceptance, walk
from draftline.decoding.decode import Decoded, decode
from draftline.decoding.fixed import FixedDecoding
from draftline.decoding.greedy import CachedTarget, Limit, greedy, greedy_batch
from draftline.drafter.draft import BlockDrafter
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError, DataError
from draftline.target.inspect import context_limit
from draftline.target.load import Target, text_config

WARM_TOKENS = 16
"""Tokens decoded before a comparison is timed."""
BLOCKS_AT_ONCE = 32
"""Blocks in one drafter pass of a replay; more only adds pairs of blocks that do not see each other."""


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt."""

    input_ids: tuple[int, ...]
    slices: tuple[str, ...] = ("all",)
    """Names that it is reported under."""
    next_turn: Callable[[Sequence[int]], Prompt] | None = field(default=None, compare=False, repr=False)
    """From the target's answer, the prompt of the user's next turn."""


@dataclass(frozen=True)
class Reference:
    """A prompt with the target's own greedy answer."""

    prompt: Prompt
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """The outcome over all prompts and over each slice of them."""

    overall: Acceptance
    slices: dict[str, Acceptance]
    ce: float
    """Nats per draft token against the target's text, mean over all slots of all anchors inside the answers."""
    tau_by_drafts: tuple[float, ...]
    """tau if only the first 1, 2, ... B - 1 drafts of each block were verified: a shorter serving block."""


def refuse_beyond_context(target: Target, prompts: Sequence[Prompt], limit: Limit) -> None:
    """Every prompt, with the longest answer to it, must fit the positions that the target was made for.

    Args:
        target: loaded, or a sketch.

    Raises:
        DataError: some do not, even with the shortest answer; the first is named with all numbers, the others counted.
        ConfigError: some do not with the answers that were asked for, but would with shorter ones.
    """
    context = context_limit(text_config(target.model.config))
    if context is None:
        return
    beyond = [n for n, prompt in enumerate(prompts) if len(prompt.input_ids) + limit.max_new_tokens > context]
    if not beyond:
        return
    prompt = prompts[beyond[0]]
    length = len(prompt.input_ids)
    fix = "shorten it" if length >= context else "shorten it or lower max_new_tokens"
    of = f" ({prompt.slices[0]})" if prompt.slices else ""
    more = f"; {len(beyond)} of the prompts are too long" if len(beyond) > 1 else ""
    shorter = all(len(prompts[n].input_ids) < context for n in beyond)
    raise (ConfigError if shorter else DataError)(
        f"prompt {beyond[0] + 1} of {len(prompts)}{of} has {length} tokens; with an answer of "
        f"{limit.max_new_tokens} (max_new_tokens) it is longer than the target's context of {context} "
        f"tokens (max_position_embeddings); {fix}{more}"
    )


def reference_answers(
    target: Target,
    prompts: Sequence[Prompt],
    limit: Limit,
    progress: Callable[[int], None] = lambda _done: None,
) -> list[Reference]:
    """The target's greedy answers; made once, they serve every evaluation against this target.

    A prompt with a next turn gives one reference for each of its turns.

    Args:
        progress: told now and then how many answers there are.

    Raises:
        DataError, ConfigError: a prompt is empty, or does not fit the target's context.
    """
    references: list[Reference] = []
    while prompts:
        refuse_beyond_context(target, prompts, limit)
        texts, before = [prompt.input_ids for prompt in prompts], len(references)
        answers = greedy_batch(
            target, texts, limit, progress=lambda done, before=before: progress(before + done)
        )
        answered = [Reference(prompt, tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        references += answered
        prompts = [
            each.prompt.next_turn(each.answer) for each in answered if each.prompt.next_turn is not None
        ]
    return references


def evaluate(
    target: Target,
    drafter: Drafter,
    references: Sequence[Reference],
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Replay every answer.

    Args:
        seed: of the confidence intervals.
        check: called before each answer; what it raises ends the evaluation.
        progress: told after each answer how many are replayed.

    Raises:
        DataError: no answer is long enough to have a verify step.
    """
    drafted: list[Drafted] = []
    for done, reference in enumerate(references, start=1):
        check()
        drafted.append(draft_everywhere(target, drafter, reference))
        progress(done)
    walks = [walk(answer.runs) for answer in drafted]
    slots = drafter.spec.block_size - 1
    slices: dict[str, list[Walk]] = {}
    for steps, reference in zip(walks, references, strict=True):
        for name in reference.prompt.slices:
            slices.setdefault(name, []).append(steps)
    return Evaluation(
        overall=acceptance(walks, slots, seed),
        slices={
            name: acceptance(members, slots, seed)
            for name, members in sorted(slices.items())
            if any(steps.produced for steps in members)
        },
        ce=sum(answer.ce_sum for answer in drafted) / max(1, sum(answer.num_drafts for answer in drafted)),
        tau_by_drafts=tuple(_tau_with_drafts(drafted, most) for most in range(1, slots + 1)),
    )


def _tau_with_drafts(drafted: Sequence[Drafted], most: int) -> float:
    walks = [walk([min(run, most) for run in answer.runs]) for answer in drafted]
    return sum(sum(steps.produced) for steps in walks) / sum(len(steps.produced) for steps in walks)


def replay(target: Target, drafter: Drafter, reference: Reference) -> Walk:
    """The verify steps that speculative decoding would take for one answer."""
    return walk(draft_everywhere(target, drafter, reference).runs)


@dataclass(frozen=True)
class Drafted:
    """What a drafter makes of one answer, drafting at each of its tokens but the last."""

    runs: list[int]
    """Drafts that would be right, were the token an anchor."""
    ce_sum: float
    """Nats, over all drafts that have a token of the answer to be compared with."""
    num_drafts: int


@torch.inference_mode()
def draft_everywhere(target: Target, drafter: Drafter, reference: Reference) -> Drafted:
    """Draft at every anchor that decoding could have in one answer."""
    prompt, answer = reference.prompt.input_ids, reference.answer
    if len(answer) < 2:
        return Drafted([], 0.0, 0)
    text = torch.tensor([*prompt, *answer], device=target.device)
    # The last token is never an anchor and the one before it never a context, yet its row must exist.
    taps = CachedTarget(target, drafter.spec.target_layer_ids).feed(text[:-1], num_logits=1).taps
    block = BlockDrafter(drafter, target.embedding, target.head, len(text) - 1)
    block.observe(taps)
    anchors = torch.arange(len(prompt), len(text) - 1, device=target.device)
    parts = [_draft_at(block, text, chunk) for chunk in anchors.split(BLOCKS_AT_ONCE)]
    runs, ce = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return Drafted(runs.tolist(), float(ce.sum()), len(ce))


def _draft_at(
    block: BlockDrafter, text: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leading drafts that equal the text at each anchor, int64 [A], and the cross-entropy of every draft that has a
    token to equal, float64 [n]; the end of the text ends a run."""
    logits = block.logits_at(text, anchors)  # [A, B-1, V]
    places = anchors[:, None] + torch.arange(1, logits.shape[1] + 1, device=anchors.device)
    inside = places < len(text)
    labels = text[places.clamp_max(len(text) - 1)]
    right = inside & (logits.argmax(dim=-1) == labels)
    ce = F.cross_entropy(logits[inside].float(), labels[inside], reduction="none")
    return right.long().cumprod(dim=1).sum(dim=1), ce.double()


@dataclass(frozen=True)
class Comparison:
    """Speculative decoding beside plain greedy decoding, both by the real decoder, one prompt at a time."""

    prompts: int
    identical: int
    """Answers equal to plain greedy decoding, token for token."""
    tokens: int
    tau: float
    """Pooled, as the decoder counted it."""
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    draft_ms: float
    verify_ms: float
    """Mean of a step."""


def compare(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    limit: Limit,
    fixed: FixedDecoding | None = None,
    progress: Callable[[int], None] = lambda _done: None,
) -> Comparison:
    """Decode every prompt twice and compare text and time, prompt reading included.

    One prompt is decoded before the clock starts: first calls load kernels and grow buffers.

    Args:
        fixed: preallocated caches that both sides use; growing ones when none are given.
        progress: told after each prompt how many are decoded; its time does not count.

    Raises:
        DataError: there is no prompt, or one is empty.
    """
    if not prompts:
        raise DataError("there is no prompt to compare decoding on; give at least one")
    plain_s, identical, results = 0.0, 0, list[Decoded]()
    warm = replace(limit, max_new_tokens=WARM_TOKENS)
    _plain(target, prompts[0], warm, fixed)
    decode(target, drafter, prompts[0].input_ids, warm, fixed=fixed)
    for prompt in prompts:
        start = time.perf_counter()
        answer = _plain(target, prompt, limit, fixed)
        plain_s += time.perf_counter() - start
        results.append(decode(target, drafter, prompt.input_ids, limit, fixed=fixed))
        identical += list(results[-1].tokens) == answer
        progress(len(results))
    return _comparison(results, identical, plain_s)


def _plain(target: Target, prompt: Prompt, limit: Limit, fixed: FixedDecoding | None) -> list[int]:
    if fixed is None:
        return greedy(target, prompt.input_ids, limit)
    fixed.reset()
    return greedy(target, prompt.input_ids, limit, fixed.verifier)


def _comparison(results: Sequence[Decoded], identical: int, plain_s: float) -> Comparison:
    tokens = sum(len(result.tokens) for result in results)
    steps = max(1, sum(len(result.produced) for result in results))
    draft_s = sum(result.draft_s for result in results)
    verify_s = sum(result.verify_s for result in results)
    speculative_s = draft_s + verify_s + sum(result.prefill_s for result in results)
    return Comparison(
        prompts=len(results),
        identical=identical,
        tokens=tokens,
        tau=sum(sum(result.produced) for result in results) / steps,
        plain_tokens_per_s=tokens / plain_s,
        speculative_tokens_per_s=tokens / speculative_s,
        speedup=plain_s / speculative_s,
        draft_ms=1000 * draft_s / steps,
        verify_ms=1000 * verify_s / steps,
    )
