"""`manifest.json`: what a checkpoint holds, byte for byte, and which run it belongs to.

It is written after every other file, so that its presence says that they are complete, and it carries the
SHA-256 of each of them and of itself: one flipped bit anywhere is found before anything is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draftline.config import Frozen
from draftline.errors import CheckpointError, OccupiedError
from draftline.resilience.names import UnsafeNameError, plain_name, read_regular
from draftline.resilience.redact import redact
from draftline.resilience.sealed import DamagedError, canonical, seal, sha256_hex, unseal

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the layout; a reader refuses a newer one instead of guessing."""
_MAX_MANIFEST_BYTES = 64 * 2**20


class FileEntry(Frozen):
    """Size and content of one file of a checkpoint."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    kind: Literal["tensors", "text"]


class Manifest(Frozen):
    """A checkpoint's table of contents."""

    format: Literal[1]
    step: int = Field(ge=0)
    """Optimizer steps done."""
    row: int = Field(ge=0)
    """Index of the next row of the run."""
    world: dict[str, Any]
    """Layout that wrote it (numbers of nodes, targets, drafters); another one may resume it."""
    config: dict[str, Any]
    """Settings that a resumed run must share."""
    config_sha256: str
    data: dict[str, Any]
    """What identifies the training data."""
    data_sha256: str
    meta: dict[str, Any]
    """Whatever else the run wants back: schedule step, metrics."""
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Identity:
    """What makes two runs the same run: both must be equal for one to resume the other."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON settings that shape the result (not devices, deadlines or how often to save)."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON facts about the training data, such as its content hash and number of documents."""

    def fields(self) -> dict[str, Any]:
        """The four manifest entries that record it, secrets redacted."""
        config, data = canonical(redact(self.config)), canonical(redact(self.data))
        return {
            "config": json.loads(config),
            "config_sha256": sha256_hex(config),
            "data": json.loads(data),
            "data_sha256": sha256_hex(data),
        }


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`, sealed."""
    return seal(manifest.model_dump(mode="json"))


def decode_manifest(data: bytes) -> Manifest:
    """Read `manifest.json`, accepting only the exact bytes that `encode_manifest` gives.

    Raises:
        DamagedError: not JSON, another checksum, a missing or unknown key, a wrong type, or a file
            name that is not one plain component.
        CheckpointError: written by a newer Draftline.
    """
    body = unseal(data, MANIFEST)
    if isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint format {body['format']} is newer than the {FORMAT} of this version; update Draftline"
        )
    try:
        manifest = Manifest.model_validate(body, strict=True)
        for name in manifest.files:
            plain_name(name)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except UnsafeNameError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from None
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder. Raises as `decode_manifest`, and OSError."""
    return decode_manifest(read_regular(folder, MANIFEST, _MAX_MANIFEST_BYTES))


def read_verified(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Read one file; the bytes that were hashed are the bytes returned, so nothing can change in between.

    Raises:
        DamagedError: the size or the SHA-256 is another than the manifest's.
        ValueError, OSError: as `read_regular`.
    """
    data = read_regular(folder, name, entry.bytes)
    if len(data) != entry.bytes:
        raise DamagedError(f"{name} has {len(data)} bytes, the manifest says {entry.bytes}")
    if sha256_hex(data) != entry.sha256:
        raise DamagedError(f"{name} does not match its SHA-256")
    return data


def require_same_run(manifest: Manifest, identity: Identity, folder: Path) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        OccupiedError: settings or data differ; every differing key is listed with both values.
    """
    ours = identity.fields()
    different = [
        *_differences("config", manifest.config, ours["config"]),
        *_differences("data", manifest.data, ours["data"]),
    ]
    if different:
        raise OccupiedError(
            f"{folder} belongs to a run with other settings or data: {'; '.join(different)}. Restore them to "
            "resume, or choose a new output folder"
        )


def _differences(part: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Dotted names of the leaves that differ, with both values."""
    for key in sorted(saved.keys() | now.keys()):
        name, old, new = f"{part}.{key}", saved.get(key, "absent"), now.get(key, "absent")
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(name, old, new)
        elif old != new:
            yield f"{name} was {old!r} and is now {new!r}"
