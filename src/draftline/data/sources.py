"""Reads records from files in bounded chunks, so that memory does not grow with the source.

A source is a file (.jsonl, .jsonl.gz, .json with one list, .parquet), a folder of such files (in order of
their names), or a hub data set by name: `owner/name`, `owner/name:split`, `owner/name/subset`,
`owner/name/subset:split` (extra `data`).
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftline.data.fingerprint import hash_file
from draftline.data.reasons import Reason, UnusableRow
from draftline.errors import DataError
from draftline.resilience.folder import METRICS

CHUNK_ROWS = 256
"""Records handed to a worker at a time."""
CHUNK_BYTES = 1 << 20
"""A chunk of lines is closed when it has this many bytes."""
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_HUB_NAME = re.compile(r"^(?P<repository>[\w.-]+/[\w.-]+)(/(?P<subset>[\w.-]+))?(:(?P<split>[\w.-]+))?$")
_WORDS = 300
"""Characters of a hub's words that an error shows."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file: raw lines, a table, or objects."""

    name: str
    """File or data set, for messages."""
    first: int
    """Number of the first record inside the file, from 0."""
    source: int
    """Number of the first record in the whole source, from 0."""
    items: list[bytes] | pa.RecordBatch | list[Any]
    bytes_read: int
    """Bytes of the whole source that have been read so far."""

    def __len__(self) -> int:
        return len(self.items)

    def records(self) -> Iterator[tuple[int, Any]]:
        """Offset in the chunk and the record; a line that is not JSON gives an UnusableRow in its place."""
        if not isinstance(self.items, list):
            yield from enumerate(self.items.to_pylist())
            return
        for offset, item in enumerate(self.items):
            if not isinstance(item, bytes):
                yield offset, item
            elif item.strip():
                yield offset, _parsed(item)

    def where(self, offset: int) -> str:
        """`file:line` of a record."""
        return f"{self.name}:{self.first + offset + 1}"


@dataclass(frozen=True)
class Source:
    """Where conversations come from, resolved."""

    name: str
    files: tuple[Path, ...]
    """Empty for a hub data set."""

    @property
    def total_bytes(self) -> int | None:
        """Size of all files, or None where it is not known."""
        return sum(path.stat().st_size for path in self.files) if self.files else None

    def content_hashes(self) -> dict[str, str]:
        """sha256 of every file by name, or the commit of a hub data set."""
        if self.files:
            return {path.name: hash_file(path) for path in self.files}
        return {self.name: _hub_commit(_hub_part(self.name, "repository"))}

    def chunks(self) -> Iterator[Chunk]:
        """All records in order.

        Raises:
            DataError: a file cannot be read.
        """
        if not self.files:
            yield from _hub_chunks(self.name)
            return
        rows = read = 0
        for path in self.files:
            for chunk in _file_chunks(path, rows, read):
                yield chunk
                rows = chunk.source + len(chunk)
            read += path.stat().st_size


def resolve_source(name: str | Path) -> Source:
    """Find the files of a source, or recognise the name of a hub data set.

    Raises:
        DataError: nothing is named or there, a folder holds no data files or has some in a
            folder below, or a file has no known suffix.
    """
    if not str(name):
        raise DataError("the source has no name ('', which would mean this folder); name a file or folder")
    path = Path(name)
    if path.is_dir():
        files = tuple(
            sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(_SUFFIXES))
        )
        below = _folders_below(path)
        if below:
            raise DataError(
                f"{path} has data files in {', '.join(map(str, below))} too, and a folder is read without those in it; "
                "name one of them, or bring all files into one folder"
            )
        if not files:
            raise DataError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}")
        return Source(str(name), files)
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise DataError(f"{path} has no known ending; known are {', '.join(_SUFFIXES)}")
        if not path.stat().st_size:
            raise DataError(f"{path} is empty")
        return Source(str(name), (path,))
    if _HUB_NAME.match(str(name)) and not path.suffix:
        return Source(str(name), ())
    raise DataError(
        f"{name} is neither a file, a folder nor the name of a hub data set (owner/name, owner/name/subset, "
        "either with :split)"
    )


def _folders_below(path: Path) -> list[Path]:
    """Visible folders inside `path` that hold data files at any depth."""
    inner = {
        file.parent
        for file in path.rglob("*")
        if file.parent != path
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and _may_hold_rows(file)
    }
    return sorted(inner)


def _may_hold_rows(file: Path) -> bool:
    """Whether a file is data and not what lies in token stores, runs and models: objects of settings, metrics."""
    if not file.name.endswith(_SUFFIXES) or file.name == METRICS or not file.is_file():
        return False
    if not file.name.endswith(".json"):
        return True
    with file.open("rb") as begun:
        return begun.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        fix = "; write the file in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        return UnusableRow(Reason.NOT_JSON, f"{error}{fix}; the line begins {line[:60]!r}")


def _file_chunks(path: Path, source: int, read: int) -> Iterator[Chunk]:
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet_chunks(path, source, read)
        elif path.name.endswith(".json"):
            yield from _list_chunks(path, source, read)
        else:
            yield from _line_chunks(path, source, read)
    except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowInvalid) as error:
        raise DataError(f"{path} is damaged or cut short: {error}") from None


def _line_chunks(path: Path, source: int, read: int) -> Iterator[Chunk]:
    with path.open("rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
        lines: list[bytes] = []
        first = size = 0
        for line in stream:
            lines.append(line.removeprefix(_BOM) if not first and not lines else line)
            size += len(line)
            if len(lines) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield Chunk(str(path), first, source + first, lines, read + raw.tell())
                first += len(lines)
                lines, size = [], 0
        if lines:
            yield Chunk(str(path), first, source + first, lines, read + raw.tell())


def _parquet_chunks(path: Path, source: int, read: int) -> Iterator[Chunk]:
    with pq.ParquetFile(path) as file:
        total, size = file.metadata.num_rows, path.stat().st_size
        first = 0
        for batch in file.iter_batches(batch_size=CHUNK_ROWS):
            done = first + batch.num_rows
            yield Chunk(str(path), first, source + first, batch, read + size * done // total)
            first = done


def _list_chunks(path: Path, source: int, read: int) -> Iterator[Chunk]:
    """One JSON list is read whole: such files are small or should be JSONL."""
    try:
        records = json.loads(path.read_bytes().removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}); name it .jsonl if it has one object a line"
        ) from None
    if not isinstance(records, list):
        raise DataError(f"{path} holds {type(records).__name__}, not a list of conversations")
    for first in range(0, len(records), CHUNK_ROWS):
        part = records[first : first + CHUNK_ROWS]
        share = path.stat().st_size * (first + len(part)) // len(records)
        yield Chunk(str(path), first, source + first, part, read + share)


def _hub_part(name: str, part: str) -> str:
    found = _HUB_NAME.match(name)
    return (found[part] or "") if found else name


@functools.cache
def _hub_commit(repository: str) -> str:
    """The newest commit; asked for once, so that what is hashed is what is read."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - only hub names need it

    try:
        return str(HfApi().dataset_info(repository).sha)
    except Exception as error:  # noqa: BLE001 - every version of the client raises its transport's own errors
        raise DataError(_unreadable(repository, error)) from None


def _hub_chunks(name: str) -> Iterator[Chunk]:
    try:
        from datasets import load_dataset  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{name} is read from the hub, which needs the `datasets` package: "
            "pip install datasets; or give a .jsonl or .parquet file"
        ) from None
    repository, subset, split = (_hub_part(name, part) for part in ("repository", "subset", "split"))
    commit = _hub_commit(repository)
    try:
        records = load_dataset(
            repository, subset or None, split=split or "train", streaming=True, revision=commit
        )
        yield from _batches(name, records)
    except Exception as error:
        # Streams raise their transport's errors, formats and data sets their own.
        raise DataError(_unreadable(name, error)) from error


def _batches(name: str, records: Any) -> Iterator[Chunk]:
    for first, batch in enumerate(records.iter(batch_size=CHUNK_ROWS)):
        columns = list(batch)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        yield Chunk(name, first * CHUNK_ROWS, first * CHUNK_ROWS, rows, 0)


def _unreadable(name: str, error: Exception) -> str:
    return (
        f"{name} is no file or folder here, and as a hub data set it cannot be read: {str(error)[:_WORDS]}; "
        "check the name and the network, or give a .jsonl or .parquet file"
    )
