"""Small JSON files that carry the SHA-256 of their own content, so that one flipped bit in them is found."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_SEAL = "self_sha256"


class DamagedError(Exception):
    """A file or folder that is not what was written; its reader makes a note or a DraftlineError of it."""


def canonical(value: Any) -> bytes:
    """The one JSON spelling of a value: sorted keys, ASCII, no NaN.

    Raises:
        ValueError: the value holds a NaN or an infinity.
        TypeError: it is not JSON.
    """
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def sha256_hex(data: bytes) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def seal(body: dict[str, Any]) -> bytes:
    """Canonical JSON of `body` with the SHA-256 of that JSON added."""
    return canonical(body | {_SEAL: sha256_hex(canonical(body))})


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The body of a sealed file, accepting only the exact bytes that `seal` gives for it.

    Raises:
        DamagedError: not JSON, not an object, or any byte differs; `name` is named.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise DamagedError(f"{name} holds {type(body).__name__}, not an object")
    body.pop(_SEAL, None)
    if not _is_sealed(body, data):
        raise DamagedError(f"{name} does not match its own checksum")
    return body


def _is_sealed(body: dict[str, Any], data: bytes) -> bool:
    try:
        return seal(body) == data
    except ValueError:  # Python's parser reads NaN and infinity, which are not JSON
        return False
