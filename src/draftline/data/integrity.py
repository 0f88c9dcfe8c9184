"""Whether the shards of a token store are the files that were written, and which documents are lost if not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.data.fingerprint import hash_file


@dataclass(frozen=True)
class Damage:
    """A shard that is not what was written."""

    path: Path
    reason: str
    first: int
    """Number of its first document."""
    documents: int

    def describe(self) -> str:
        """File, reason and what was in it."""
        last = self.first + self.documents - 1
        return f"{self.path} {self.reason}; it held documents {self.first} to {last} ({self.documents})"


def find_damage(folder: Path, shards: Sequence[dict[str, Any]], *, verify: bool) -> list[Damage]:
    """Shards of a manifest that are missing, unreadable, of another size or, with `verify`, of another sha256.

    Shards are read in parallel. One that holds what another one should is said to.
    """
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(lambda shard: _reason(folder / shard["file"], shard, shards, verify), shards)
    damages, first = list[Damage](), 0
    for shard, reason in zip(shards, reasons, strict=True):
        if reason is not None:
            damages.append(Damage(folder / shard["file"], reason, first, shard["rows"]))
        first += shard["rows"]
    return damages


def _reason(path: Path, shard: dict[str, Any], shards: Sequence[dict[str, Any]], verify: bool) -> str | None:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size == shard["bytes"] and not verify:
        return None
    try:
        found = hash_file(path)
    except OSError as error:
        return f"cannot be read ({error})"
    if found == shard["sha256"]:
        return None
    if swapped := [other["file"] for other in shards if other["sha256"] == found]:
        return f"is corrupt: it is {swapped[0]} under another name"
    return (
        f"is corrupt: it is not the file that was written (sha256 {shard['sha256'][:16]}, "
        f"{shard['bytes']} bytes)"
    )
