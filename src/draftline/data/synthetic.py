"""Random documents in memory: for timing and checks in which only lengths and shapes matter."""

from __future__ import annotations

import numpy as np

from draftline.data.document import Document

PROMPT_SHARE = 0.2
"""Share of each document that is not supervised, at its start."""


class SyntheticStore:
    """Documents of given lengths; ids are drawn from the whole vocabulary, a function of the seed."""

    def __init__(self, lengths: np.ndarray, vocab_size: int, seed: int = 0) -> None:
        self.lengths = lengths.astype(np.int32)
        self._vocab_size, self._seed = vocab_size, seed

    def document(self, index: int, /) -> Document:
        """The document of that number."""
        length = int(self.lengths[index])
        draws = np.random.default_rng([self._seed, index])
        ids = draws.integers(0, self._vocab_size, length, dtype=np.int32)
        return Document(ids, np.arange(length) >= int(PROMPT_SHARE * length))


def mixed_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Lengths like those of chats: log-normal around 700 tokens, 32 to `longest`, int32 [count]."""
    draws = np.random.default_rng(seed).lognormal(6.5, 0.8, count)
    return np.clip(draws, 32, longest).astype(np.int32)
