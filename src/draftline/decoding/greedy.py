"""The target with its K/V cache: tokens in, logits and taps out, and rejected tokens taken back.

Also plain greedy decoding with it, one prompt or a batch: the yardstick of everything speculative.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from draftline.errors import DataError
from draftline.target.forward import decoder_layers
from draftline.target.load import Target


class Fed(NamedTuple):
    """What the target says to n new tokens."""

    logits: Tensor  # [kept, V]
    taps: Tensor  # [n, K*D]; [n, 0] without taps


def is_recurrent(target: Target) -> bool:
    """Whether layers keep a running state (gated delta, Mamba), which cannot drop tokens like a K/V cache."""
    return target.model._is_stateful  # pyright: ignore[reportPrivateUsage]


class SequenceInWork(Protocol):
    """A target with what it has read."""

    def feed(self, tokens: Tensor, num_logits: int) -> Fed:
        """Append tokens int64 [n]; logits of the last `num_logits` of them (dtype of the target)."""
        ...

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, all of them from the last `feed`."""
        ...


class CachedTarget:
    """One sequence in work. It hooks the shared model while it runs: one thread at a time per target.

    Rejected tokens are cut from a K/V cache. A recurrent state has no such cut, and transformers' own
    roll-back for it gives wrong logits (`DynamicCache.crop` restores the convolution states only): there the
    whole cache is copied before each block and the tokens that stay are fed again, exact and slow.
    """

    def __init__(self, target: Target, target_layer_ids: tuple[int, ...] = ()) -> None:
        self.model, self.device = target.model, target.device
        self.recurrent = is_recurrent(target)
        layers = decoder_layers(target.model)[2]
        self._tapped = [layers[index] for index in target_layer_ids]
        self._cache, self._cache_argument = _new_cache(target), cache_argument(target)
        self._before: DynamicCache | None = None
        self._last = torch.empty(0, dtype=torch.int64)
        self.length = 0

    def feed(self, tokens: Tensor, num_logits: int) -> Fed:
        """Append tokens int64 [n]; logits of the last `num_logits` of them (dtype of the target)."""
        if self.recurrent:
            self._before, self._last = copy.deepcopy(self._cache), tokens
        positions = torch.arange(self.length, self.length + len(tokens), device=self.device)
        with tapping(self._tapped) as taps:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=True,
                logits_to_keep=num_logits,
                **{self._cache_argument: self._cache},
            )
        self.length += len(tokens)
        empty = tokens.new_empty((len(tokens), 0))
        return Fed(output.logits[0], torch.cat([tap[0] for tap in taps], dim=-1) if taps else empty)

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, all of them from the last `feed`."""
        if count == 0:
            return
        if not self.recurrent:
            self._cache.crop(-count)
            self.length -= count
            return
        assert self._before is not None
        kept = self._last[: len(self._last) - count]
        self._cache, self.length = self._before, self.length - len(self._last)
        if len(kept):
            self.feed(kept, num_logits=1)


def _new_cache(target: Target) -> DynamicCache:
    # With a config, sliding layers would drop tokens that a roll-back needs again; without one, every layer
    # keeps all and the mask does the sliding. Recurrent layers exist only in a cache that knows the config.
    return DynamicCache(config=target.model.config) if is_recurrent(target) else DynamicCache()


def cache_argument(target: Target) -> str:
    """`cache` from transformers 5.24 on; before, and in remote model code, `past_key_values`."""
    forward = inspect.signature(type(target.model).forward)
    return "cache" if "cache" in forward.parameters else "past_key_values"


@contextmanager
def tapping(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The outputs [batch, n, D] of `layers`, in the order given, of a forward that runs inside the block."""
    taps = [torch.empty(0)] * len(layers)

    def keep_at(slot: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            taps[slot] = output[0] if isinstance(output, tuple) else output

        return keep

    hooks = [layer.register_forward_hook(keep_at(slot)) for slot, layer in enumerate(layers)]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Limit:
    """When an answer ends."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Any of these ends the answer and is its last token."""

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """The part of an answer's tokens that counts."""
        for index, token in enumerate(tokens[: self.max_new_tokens]):
            if token in self.stop_token_ids:
                return list(tokens[: index + 1])
        return list(tokens[: self.max_new_tokens])

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether an answer that holds `tokens` is complete."""
        return len(tokens) >= self.max_new_tokens or tokens[-1] in self.stop_token_ids


def prompt_tensor(prompt: Sequence[int], device: torch.device) -> Tensor:
    """Prompt tokens on a device, int64 [n].

    Raises:
        DataError: the prompt is empty.
    """
    if len(prompt) == 0:
        raise DataError("the prompt holds no token; decoding needs at least one to start from")
    return torch.tensor(list(prompt), device=device)


@torch.inference_mode()
def greedy(
    target: Target, prompt: Sequence[int], limit: Limit, sequence: SequenceInWork | None = None
) -> list[int]:
    """The target's own greedy answer, one token a step.

    Args:
        sequence: empty, of this target; a growing cache when none is given.

    Raises:
        DataError: the prompt is empty.
    """
    sequence, answer = sequence or CachedTarget(target), []
    tokens = prompt_tensor(prompt, target.device)
    while not answer or not limit.reached(answer):
        answer.append(int(sequence.feed(tokens, num_logits=1).logits[-1].argmax()))
        tokens = tokens.new_tensor(answer[-1:])
    return answer


def greedy_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: Limit,
    batch_size: int = 32,
    progress: Callable[[int], None] = lambda _done: None,
) -> list[list[int]]:
    """`greedy` for many prompts at a time; answers in the order of the prompts.

    Batched arithmetic rounds differently, so two tokens of nearly equal logits may swap against `greedy`:
    rare in fp32, common in bf16.

    Args:
        progress: told after each batch how many prompts are answered.

    Raises:
        DataError: a prompt is empty.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    lengths, done = [len(prompt) for prompt in prompts], 0
    for members in _batches(lengths, batch_size, equal_lengths=is_recurrent(target)):
        lines = _greedy_lines(target, [prompts[index] for index in members], limit)
        for index, line in zip(members, lines, strict=True):
            answers[index] = limit.cut(line)
        done += len(members)
        progress(done)
    return answers


def _batches(lengths: Sequence[int], batch_size: int, equal_lengths: bool) -> Iterator[list[int]]:
    """Prompt numbers in batches of similar length; equal where a running state would take in padding."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for _, group in groupby(order, key=lambda index: lengths[index] if equal_lengths else 0):
        members = list(group)
        for start in range(0, len(members), batch_size):
            yield members[start : start + batch_size]


@torch.inference_mode()
def _greedy_lines(target: Target, prompts: Sequence[Sequence[int]], limit: Limit) -> list[list[int]]:
    """Answers of one batch, as long as the longest of them: what follows a stop token is noise."""
    tokens, mask = _left_padded(prompts, target.device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    cache, written = {cache_argument(target): _new_cache(target)}, []
    stop = torch.tensor(sorted(limit.stop_token_ids), dtype=torch.int64, device=target.device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=target.device)
    while len(written) < limit.max_new_tokens and running.any():
        output = target.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache,
        )
        tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)  # [lines, 1]
        written.append(tokens)
        running &= ~torch.isin(tokens[:, 0], stop)
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.cat(written, dim=1).tolist()


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [lines, longest] each."""
    lines = [prompt_tensor(prompt, device) for prompt in prompts]
    longest = max(len(line) for line in lines)
    tokens = torch.stack([F.pad(line, (longest - len(line), 0)) for line in lines])
    mask = torch.stack([F.pad(torch.ones_like(line), (longest - len(line), 0)) for line in lines])
    return tokens, mask
