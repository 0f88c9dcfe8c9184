"""How tokens are chosen while decoding: greedily, or by sampling, with and without a drafter.

Both leave the target's output as it would be without a drafter: greedy token for token, sampled in
distribution (speculative sampling, arXiv 2211.17192, section 2.3).

Legend: V = vocabulary rows, B = block size; a block has B - 1 drafts and the target gives B rows of logits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftline.errors import ConfigError


class Verdict(NamedTuple):
    """What the target makes of one block of drafts."""

    accepted: int
    """Leading drafts that stay."""
    bonus: int
    """The target's own token after them."""


class Choice(Protocol):
    """A rule for taking tokens from logits."""

    def first(self, logits: Tensor) -> int:
        """The token after the prompt, from the target's last logits [V]."""
        ...

    def propose(self, logits: Tensor) -> Tensor:
        """Drafts [B-1] from the drafter's logits [B-1, V]; kept in mind until `verify`."""
        ...

    def verify(self, drafts: Tensor, logits: Tensor) -> Verdict:
        """Drafts [B-1] against the target's logits [B, V], where row k follows draft k."""
        ...


class Greedy:
    """Always the most likely token."""

    def first(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def propose(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def verify(self, drafts: Tensor, logits: Tensor) -> Verdict:
        choices = logits.argmax(dim=-1)  # [B]
        accepted = leading_run(drafts == choices[:-1])
        return Verdict(accepted, int(choices[accepted]))


class Sampled:
    """Tokens drawn at a temperature from the top-k and top-p part of the distribution, seeded.

    Raises:
        ConfigError: a temperature that is not positive, a top-p outside (0, 1], a negative top-k.
    """

    def __init__(
        self, seed: int, device: torch.device, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
    ) -> None:
        if temperature <= 0 or not 0 < top_p <= 1 or top_k < 0:
            raise ConfigError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: sampling needs temperature > 0, "
                "0 < top_p <= 1 and top_k >= 0 (0 keeps all); leave sampling out for greedy decoding"
            )
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.generator = torch.Generator(device).manual_seed(seed)
        self._proposal = torch.empty(0)

    def first(self, logits: Tensor) -> int:
        return int(self._draw(self.probabilities(logits)[None])[0])

    def propose(self, logits: Tensor) -> Tensor:
        self._proposal = self.probabilities(logits)
        return self._draw(self._proposal)

    def verify(self, drafts: Tensor, logits: Tensor) -> Verdict:
        target, proposal = self.probabilities(logits), self._proposal
        p = target[:-1].gather(-1, drafts[:, None])[:, 0]
        q = proposal.gather(-1, drafts[:, None])[:, 0]
        threshold = torch.rand(q.shape, generator=self.generator, device=q.device)
        accepted = leading_run(threshold * q < p)
        if accepted == len(drafts):
            return Verdict(accepted, int(self._draw(target[-1:])[0]))
        rest = (target[accepted] - proposal[accepted]).clamp_min(0)
        # Nothing is left only where both distributions are equal up to rounding; then either one is right.
        rest = torch.where(rest.sum() > 0, rest, target[accepted])
        return Verdict(accepted, int(self._draw(rest[None])[0]))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits [n, V] -> probabilities [n, V] in fp32 after temperature, top-k and top-p."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            smallest = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        if self.top_p == 1.0:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the more likely tokens
        kept = torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(before >= self.top_p, 0))
        return kept / kept.sum(dim=-1, keepdim=True)

    def _draw(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


def leading_run(right: Tensor) -> int:
    """Length of the leading run of True in bool [n]."""
    return int(right.long().cumprod(dim=0).sum())
