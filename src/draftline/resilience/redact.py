"""Secrets never reach a file: values are hidden by the name of their key and by the shape of a token.

`token_budget`, `mask_token_id` or `eos_token` are this field's ordinary words, so a key counts as secret only
when the whole name says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[redacted]"

_OWNER = r"(?:hf|hub|huggingface|wandb|github|gh|gitlab|openai|api|auth|access|bearer|refresh|session)"
_NAME = (
    rf"(?:(?:{_OWNER}[_-])*{_OWNER}[_-]?token|(?:\w+[_-])?(?:secret|password|passwd|passphrase|credentials?)"
    r"|(?:\w+[_-])?(?:api|access|secret|private|signing)[_-]?key(?:[_-]id)?|authorization|cookie)"
)
_SECRET_KEY = re.compile(rf"-{{0,2}}(?:{_NAME}|token)", re.IGNORECASE)
# In prose a bare "token: x" is about language, so only the forms of a flag or a URL count there.
_ASSIGNMENT = re.compile(
    rf"((?<![\w.-])(?:--)?{_NAME}[\"']?\s*[=:]\s*|(?:--|[?&])token=)(?!\s)[^\s,;&]+", re.IGNORECASE
)
_TOKENS = (
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"),
    re.compile(r"\bglpat-[\w-]{16,}"),
    re.compile(r"\bsk-[\w-]{16,}"),
    re.compile(r"\bwandb_v\d_\w{16,}"),
    re.compile(r"\bAKIA[A-Z0-9]{16}\b"),
    re.compile(r"\bxox[abprs]-[\w-]{10,}"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"),
    re.compile(r"(?<=Bearer )[^\s,;\"']+"),
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


def redact(value: Any) -> Any:
    """A copy of a JSON value with every secret replaced by `[redacted]`. Tuples become lists."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key) else redact(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def _is_secret(key: str) -> bool:
    return _SECRET_KEY.fullmatch(key) is not None


def redact_text(text: str) -> str:
    """`text` without tokens, passwords in URLs and `name=value` secrets."""
    text = _URL_PASSWORD.sub(f"{HIDDEN}@", text)
    for pattern in _TOKENS:
        text = pattern.sub(HIDDEN, text)
    return _ASSIGNMENT.sub(rf"\g<1>{HIDDEN}", text)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets, also where the value is an argument of its own (`--hf-token X`)."""
    follows_secret = [False, *(item.startswith("-") and _is_secret(item) for item in argv)]
    return [HIDDEN if hide else redact_text(item) for item, hide in zip(argv, follows_secret, strict=False)]
