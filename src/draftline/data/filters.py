"""Which texts that a target wrote as a user are worth answering."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from enum import StrEnum

MIN_CHARACTERS = 8
"""A shorter text asks for nothing."""
_MAX_ODD_SHARE = 0.1
"""Share of characters that are no letters, digits, punctuation or spaces, above which a text is noise."""
_GRAM = 4
_MAX_REPEATS = 3
_WORD = re.compile(r"\w+")
_TAG = re.compile(r"<[|/]?\w+[|/]?>|<\|")
_PLAIN = frozenset("LNPZM")
"""Unicode categories of text: letters, numbers, punctuation, separators, marks on letters."""
_WRITTEN = frozenset("\n\t=+<>$^`|~")
"""Characters of other categories that requests are full of (code, sums)."""


class Refused(StrEnum):
    """Why a synthesised user turn is not used."""

    CUT_OFF = "did not end within the limit"
    TOO_SHORT = "too short to ask for anything"
    CONTROL = "control tokens or tags inside"
    NOISE = "too many characters that are no text"
    REPEATS = "repeats itself"
    DUPLICATE = "the same request again"


def refuse(text: str, *, ended: bool, seen: set[str]) -> Refused | None:
    """The first reason against a user turn, or None. `seen` holds the keys of the accepted ones."""
    if not ended:
        return Refused.CUT_OFF
    if len(text.strip()) < MIN_CHARACTERS:
        return Refused.TOO_SHORT
    if _TAG.search(text):
        return Refused.CONTROL
    if _odd_share(text) > _MAX_ODD_SHARE:
        return Refused.NOISE
    if _most_frequent_gram(text) >= _MAX_REPEATS:
        return Refused.REPEATS
    return Refused.DUPLICATE if request_key(text) in seen else None


def request_key(text: str) -> str:
    """Hash of the words alone: requests that differ in case, spaces or punctuation are the same."""
    words = " ".join(_WORD.findall(text.casefold()))
    return hashlib.blake2b((words or text).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _odd_share(text: str) -> float:
    odd = sum(unicodedata.category(mark)[0] not in _PLAIN and mark not in _WRITTEN for mark in text)
    return odd / len(text)


def _most_frequent_gram(text: str) -> int:
    words = _WORD.findall(text.casefold())
    grams = Counter(tuple(words[at : at + _GRAM]) for at in range(len(words) - _GRAM + 1))
    return max(grams.values(), default=0)
