"""Text with marked characters becomes token ids with a supervised mask."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftline.data.answers import Marked, mark_answers
from draftline.data.conversations import Conversation, TokenText, trim_to_last_answer
from draftline.data.document import Document
from draftline.data.reasons import Note, Reason, UnusableRow
from draftline.data.template import ChatTemplate


def encode(template: ChatTemplate, conversation: Conversation) -> tuple[list[Document], Counter[Note]]:
    """Documents of one conversation (more than one where the template rewrites earlier turns), and notes.

    Raises:
        UnusableRow: nothing in the conversation can be trained on; the reason says why.
    """
    trimmed = trim_to_last_answer(conversation)
    documents, notes = mark_answers(template, trimmed)
    notes[Note.TRIMMED] += len(trimmed.messages) < len(conversation.messages)
    return [tokenize(template.tokenizer, document) for document in documents], notes


def tokenize(tokenizer: PreTrainedTokenizerBase, marked: Marked) -> Document:
    """Token ids of the text; a token is supervised when its characters lie inside a marked span.

    Where a token crosses the border of an answer, prompt and answer are tokenised apart, as a server does.

    Raises:
        UnusableRow: they cannot be tokenised apart without changing the text.
    """
    encoded = tokenizer(marked.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0], offsets[:, 1]
    supervised = np.zeros(len(ids), dtype=bool)
    for start, end in marked.spans:
        touching = (ends > start) & (starts < end)
        if np.any(touching & ((starts < start) | (ends > end))):
            return _tokenize_apart(tokenizer, marked)
        supervised |= touching
    return Document(ids, supervised)


def _tokenize_apart(tokenizer: PreTrainedTokenizerBase, marked: Marked) -> Document:
    borders = [0, *(border for span in marked.spans for border in span), len(marked.text)]
    ids: list[int] = []
    supervised: list[bool] = []
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        piece = tokenizer(marked.text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        ids += piece
        supervised += [number % 2 == 1] * len(piece)
    if decode(tokenizer, ids) != marked.text:
        raise UnusableRow(Reason.STRADDLES, f"near {marked.text[borders[1] - 20 : borders[1] + 20]!r}")
    return Document(np.asarray(ids, dtype=np.int32), np.asarray(supervised, dtype=bool))


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The exact text of token ids, control tokens included."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token id; the length of a tokenizer with gaps says less."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def token_document(row: TokenText, vocab_size: int) -> Document:
    """The document of a row that came as token ids.

    Raises:
        UnusableRow: an id is not in the vocabulary, or nothing is supervised.
    """
    # compared before they become an array, which no integer beyond 64 bits does
    lowest, highest = min(row.input_ids, default=0), max(row.input_ids, default=0)
    if row.input_ids and not (lowest >= 0 and highest < vocab_size):
        raise UnusableRow(Reason.BAD_TOKEN, f"ids {lowest}..{highest}, the tokenizer has {vocab_size}")
    supervised = np.asarray(row.supervised, dtype=bool)
    if not supervised.any():
        raise UnusableRow(Reason.NO_SUPERVISED, "the mask is all zero")
    return Document(np.asarray(row.input_ids, dtype=np.int32), supervised)


def clip(document: Document, max_length: int) -> Document:
    """The first `max_length` tokens.

    Raises:
        UnusableRow: too little is left to train on.
    """
    ids, supervised = document.input_ids[:max_length], document.supervised[:max_length]
    if not np.any(supervised[:-1] & supervised[1:]):
        clipped = len(document) > max_length and not supervised.any()
        reason = Reason.PROMPT_TOO_LONG if clipped else Reason.TOO_FEW
        raise UnusableRow(reason, f"{int(supervised.sum())} of {len(document)} tokens supervised")
    return Document(ids, supervised)
