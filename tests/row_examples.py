"""Documents and stores in memory, shared by the tests of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from draftline.data.document import Document
from draftline.data.rows import RowShape


class MemoryStore:
    """Documents by number."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.lengths = np.array([len(document) for document in documents], dtype=np.int32)

    def document(self, index: int, /) -> Document:
        return self.documents[index]


def document(supervised: Sequence[bool | int], first_token: int = 1) -> Document:
    """A document with the given mask, its tokens numbered from `first_token`."""
    input_ids = np.arange(first_token, first_token + len(supervised), dtype=np.int32)
    return Document(input_ids, np.array(supervised, dtype=bool))


def answered(prompt: int, answer: int, first_token: int = 1) -> Document:
    """A prompt of so many tokens and its answer."""
    return document([False] * prompt + [True] * answer, first_token)


def store_of_lengths(lengths: Sequence[int]) -> MemoryStore:
    """Documents of these lengths, each token id unique, the second half of each document supervised."""
    firsts = np.cumsum([1, *lengths])
    documents = [
        answered(length // 2, length - length // 2, int(first))
        for length, first in zip(lengths, firsts, strict=False)
    ]
    return MemoryStore(documents)


def shape(**changes) -> RowShape:
    """A small row shape: 256 tokens, 32 blocks of 8, one full-attention table."""
    settings = {
        "token_budget": 256,
        "block_budget": 32,
        "block_size": 8,
        "anchors_per_document": 32,
        "decay_gamma": 4.0,
        "windows": ((None, False),),
    }
    return RowShape(**{**settings, **changes})


@st.composite
def document_lists(draw, token_budget: int = 256) -> list[Document]:
    """One or more documents that fit into a row together, with masks that have gaps."""
    documents: list[Document] = []
    room = token_budget
    while room and (not documents or draw(st.booleans())):
        # Short documents, and ones that end exactly where the row does, are the interesting lengths.
        length = draw(st.one_of(st.integers(1, min(room, 12)), st.integers(1, room), st.just(room)))
        runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=12))
        mask = [value for value, times in runs for _ in range(times)]
        supervised = (mask * (length // len(mask) + 1))[:length]
        documents.append(document(supervised, first_token=1 + token_budget - room))
        room -= length
    return documents


row_shapes = st.builds(
    lambda size, units, most, gamma: shape(
        block_size=size,
        block_budget=units * 128 // np.gcd(128, size),
        anchors_per_document=most,
        decay_gamma=gamma,
    ),
    size=st.sampled_from([2, 7, 8, 16, 32]),
    units=st.integers(1, 3),
    most=st.integers(1, 300),
    gamma=st.floats(0.5, 20),
)
