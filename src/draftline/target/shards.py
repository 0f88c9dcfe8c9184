"""The target's weight files, looked at before any device work: all there, none cut short, none outside.

The index and the headers come from outside and are read as data that may be wrong.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import from_json

from draftline.errors import CheckpointError
from draftline.resilience.names import UnsafeNameError, plain_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth")


class _Index(BaseModel):
    weight_map: dict[str, str] = Field(min_length=1)


class _Entry(BaseModel):
    data_offsets: tuple[int, int]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def check_shards(folder: Path) -> None:
    """Find weight files that are missing or cut short.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    for name in sorted(_shard_names(folder)):
        _check_length(folder / name)


def _shard_names(folder: Path) -> set[str]:
    """The files that transformers will read: the single one if it is there, else those of the index."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return {SINGLE}
    try:
        names = set(_Index.model_validate(from_json(index.read_bytes())).weight_map.values())
        return {plain_name(name) for name in names}
    except UnsafeNameError as error:
        raise CheckpointError(f"{index} names a shard outside {folder}: {error}") from None
    except ValueError:
        raise CheckpointError(
            f"{index} is not an index of safetensors (weight_map: tensor -> file); download it again"
        ) from None


def _check_length(path: Path) -> None:
    """Compare a safetensors file's length with what its header promises."""
    if not path.is_file():
        raise CheckpointError(_missing(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if not 0 < header_size <= size - 8:
            raise CheckpointError(f"target shard {path} is cut short in its header; download it again")
        header = file.read(header_size)
    promised = 8 + header_size + _data_size(path, header)
    if size != promised:
        raise CheckpointError(
            f"target shard {path} has {size} bytes, its header promises {promised}; download it again"
        )


def _missing(path: Path) -> str:
    pickles = sorted(file.name for file in path.parent.iterdir() if file.suffix in _PICKLES)
    if not pickles:
        return f"target shard {path} is missing; download the target again (safetensors are needed)"
    return (
        f"target shard {path} is missing, and {pickles[0]} is a pickle, which can run code and is never opened; take a "
        "release of the target with safetensors, or convert one that you trust: load it and "
        "save_pretrained(FOLDER, safe_serialization=True)"
    )


def _data_size(path: Path, header: bytes) -> int:
    """Bytes of all tensors together, by a safetensors header."""
    try:
        entries = from_json(header)
        entries.pop("__metadata__", None)
        return max((entry.data_offsets[1] for entry in _ENTRIES.validate_python(entries).values()), default=0)
    except (ValueError, AttributeError):
        raise CheckpointError(
            f"target shard {path} has a header that cannot be read; download it again"
        ) from None
