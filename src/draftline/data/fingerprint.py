"""Content hashes: what decides whether a token store is still the right one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

_PROBE = (
    "The quick brown fox, 12345 + 678 = 13023!\n\n\tdef f(x):\n        return x ** 2  # naïve café\n"
    "日本語 中文 한국어 Ελληνικά العربية 🙂👩‍🚀 <think> \r\n  trailing "
)


def hash_json(value: Any) -> str:
    """sha256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def hash_template(text: str) -> str:
    """Hash of a chat template's Jinja text."""
    return hash_json(text)


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary and of how a probing text is split.

    It follows from what the tokenizer does, not from how a library version writes it to disk, so the same
    tokenizer loaded by another version keeps its hash. The chat template is not part of it.
    """
    return hash_json(
        [sorted(tokenizer.get_vocab().items()), tokenizer.encode(_PROBE, add_special_tokens=False)]
    )
