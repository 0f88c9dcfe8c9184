"""A tokenised conversation, and what the row builder needs to know of a store of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class Document:
    """One conversation as the target sees it.

    Both arrays have one entry per token. `supervised` is True where the target itself wrote the token, the
    end-of-turn token included: only those are anchors or labels.
    """

    input_ids: np.ndarray  # int32 [tokens]
    supervised: np.ndarray  # bool [tokens]

    def __len__(self) -> int:
        return len(self.input_ids)


class DocumentStore(Protocol):
    """Documents by number. Both members must be pure and safe to call from several threads."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int32 [documents]."""
        ...

    def document(self, index: int, /) -> Document:
        """The document of that number."""
        ...
