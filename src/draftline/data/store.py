"""The token store: a folder of Arrow IPC shards and a manifest, memory-mapped, written once and verified.

    store/
      manifest.json          what it was made from (hashes), shards with rows and sha256
      report.json            what happened to every source row
      shard-00000.arrow      columns below

Columns: `input_ids` list<int32>; `spans` list<int32>, the supervised runs as start, end, start, end, ...;
`key` uint64, content hash of the source row; `source` int64, its number in the source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa

from draftline.config import OnCorrupt
from draftline.data.document import Document
from draftline.data.fingerprint import hash_file
from draftline.data.integrity import Damage, find_damage
from draftline.data.journal import lock_file
from draftline.data.output import writing
from draftline.errors import DataError

FORMAT = 1
"""Version of the layout; a store of another version is made again."""
MANIFEST, REPORT = "manifest.json", "report.json"
_SHARD = re.compile(r"shard-\d{5,}\.arrow")
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("key", pa.uint64()),
        ("source", pa.int64()),
    ]
)
_NONE = np.zeros(0, dtype=np.int32)
SHARD_TOKENS = 64 * 1024 * 1024
"""Tokens after which a new shard is begun (256 MiB)."""


@dataclass(frozen=True)
class Entry:
    """One document with where it came from."""

    document: Document
    key: int
    source: int


@dataclass(frozen=True)
class _Chunk:
    """Views into one mapped record batch."""

    ids: np.ndarray  # int32 [tokens]
    id_offsets: np.ndarray  # int32 [documents + 1]
    spans: np.ndarray  # int32 [2 * runs]
    span_offsets: np.ndarray  # int32 [documents + 1]
    keys: np.ndarray  # uint64 [documents]
    sources: np.ndarray  # int64 [documents]


class TokenStore:
    """Documents by number, straight from memory-mapped files. Reading is safe from several threads."""

    def __init__(self, path: Path, manifest: dict[str, Any], damages: Sequence[Damage] = ()) -> None:
        self.path = path
        self.manifest = manifest
        self.damages = tuple(damages)
        """Shards that are left out; documents are numbered over the others."""
        left_out = {damage.path.name for damage in damages}
        files = [shard["file"] for shard in manifest["shards"] if shard["file"] not in left_out]
        self._chunks = [chunk for file in files for chunk in _map_shard(path / file)]
        counts = [len(chunk.keys) for chunk in self._chunks]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # int64 [chunks + 1]
        lengths = [np.diff(chunk.id_offsets) for chunk in self._chunks]
        self.lengths: np.ndarray = np.concatenate([_NONE, *lengths])
        """Tokens of each document, int32 [documents]."""

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> Document:
        """Document `index`; `input_ids` is a read-only view of the file.

        Raises:
            IndexError: there is no such document.
        """
        chunk, row = self._locate(index)
        ids = chunk.ids[chunk.id_offsets[row] : chunk.id_offsets[row + 1]]
        supervised = np.zeros(len(ids), dtype=bool)
        for start, end in chunk.spans[chunk.span_offsets[row] : chunk.span_offsets[row + 1]].reshape(-1, 2):
            supervised[start:end] = True
        return Document(ids, supervised)

    def entry(self, index: int) -> Entry:
        """Document `index` with its content hash and the number of its source row."""
        chunk, row = self._locate(index)
        return Entry(self.document(index), int(chunk.keys[row]), int(chunk.sources[row]))

    def keys(self) -> np.ndarray:
        """Content hash of every document's source row, uint64 [documents]."""
        return np.concatenate([np.zeros(0, np.uint64), *(chunk.keys for chunk in self._chunks)])

    def sources(self) -> np.ndarray:
        """Number of every document's source row, int64 [documents]."""
        return np.concatenate([np.zeros(0, np.int64), *(chunk.sources for chunk in self._chunks)])

    def num_source_rows(self) -> int:
        """Rows of the source that it was made from, those included that gave no document.

        Raises:
            DataError: its report is missing or damaged.
        """
        path = self.path / REPORT
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({error}); prepare the store again") from None

    def _locate(self, index: int) -> tuple[_Chunk, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of a store of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._chunks[number], index - int(self._first[number])


def open_store(
    path: Path, tokenizer_hash: str | None = None, *, verify: bool = True, on_corrupt: OnCorrupt = "stop"
) -> TokenStore:
    """Open a token store; with `verify` every shard's sha256 is checked first, shards in parallel.

    Args:
        on_corrupt: skip leaves out shards that are missing or corrupt (`TokenStore.damages`).

    Raises:
        DataError: there is no complete store, shards are missing or corrupt (all are named, with their documents) and
            not to be skipped, none is intact, or the store was made for another tokenizer (both hashes are named).
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise DataError(f"{path} is not a token store (no {MANIFEST}); make one with `draftline prepare`")
    if manifest["format"] != FORMAT:
        raise DataError(
            f"{path} has store format {manifest['format']}, this version reads {FORMAT}; prepare it again"
        )
    if tokenizer_hash is not None and manifest["tokenizer"] != tokenizer_hash:
        raise DataError(
            f"{path} was made for tokenizer {manifest['tokenizer'][:16]} ({manifest['tokenizer_name']}), the "
            f"target has {tokenizer_hash[:16]}; prepare the data again with the target's tokenizer"
        )
    damages = find_damage(path, manifest["shards"], verify=verify)
    if damages and (on_corrupt == "stop" or len(damages) == len(manifest["shards"])):
        raise DataError(f"{'; '.join(one.describe() for one in damages)}. {_fix(damages, manifest)}")
    return TokenStore(path, manifest, damages)


def _fix(damages: Sequence[Damage], manifest: dict[str, Any]) -> str:
    fix = "Restore a copy, or delete the store and prepare it again"
    if len(damages) == len(manifest["shards"]):
        return f"{fix}; no shard is intact"
    return f"{fix}; data.on_corrupt=skip starts a run on what is left"


def foreign_files(path: Path) -> list[str]:
    """What lies in the folder of a store and is no part of any store, by name."""
    names = (entry.name for entry in path.iterdir())
    return sorted(name for name in names if name not in (MANIFEST, REPORT) and not _SHARD.fullmatch(name))


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a finished store, or None where there is none."""
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DataError(f"{path} is a file, not a token store; name the folder of one") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path / MANIFEST} cannot be read ({error}); prepare the store again") from None


def _map_shard(path: Path) -> list[_Chunk]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [_views(reader.get_batch(number)) for number in range(reader.num_record_batches)]


def _views(batch: pa.RecordBatch) -> _Chunk:
    ids, spans, keys, sources = batch.columns
    return _Chunk(
        ids.values.to_numpy(),
        ids.offsets.to_numpy(),
        spans.values.to_numpy(),
        spans.offsets.to_numpy(),
        keys.to_numpy(),
        sources.to_numpy(),
    )


class StoreWriter:
    """Writes a store beside its place and renames it there when complete: nobody ever reads half a store.

    Its methods raise DiskFullError when there is no room left, ConfigError when the folder cannot be written.
    One process at a time: a file beside the store is locked. What a killed one left is cleared away.
    """

    def __init__(self, path: Path) -> None:
        self._final = path
        self._folder = path.with_name(f".{path.name}.writing")
        self._lock: IO[bytes] | None = None
        self._shards: list[dict[str, Any]] = []
        self._keys = array("Q")
        self._rows_seen = 0
        self._tokens = 0
        self._rows = 0
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def __enter__(self) -> Self:
        with self._writing():
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self._final.with_name(f".{self._final.name}.lock"), "wb", str(self._final))
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(OSError):  # on a full disk it cannot end its file, which goes anyway
                self._writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        assert self._lock is not None
        self._lock.close()

    def append(self, batch: pa.RecordBatch) -> None:
        """Add documents, in order (`record_batch` makes a batch)."""
        if not batch.num_rows:
            return
        with self._writing():
            writer = self._writer or pa.ipc.new_file(str(self._shard_path()), SCHEMA)
            self._writer = writer
            writer.write_batch(batch)
        # Copied: a view would keep the whole batch in memory.
        self._keys.frombytes(batch.column("key").to_numpy().tobytes())
        self._rows_seen += len(np.unique(batch.column("source").to_numpy()))
        self._tokens += len(batch.column(0).values)
        self._rows += batch.num_rows
        if self._tokens >= SHARD_TOKENS:
            with self._writing():
                self._finish_shard()

    def duplicates(self) -> int:
        """Source rows whose content an earlier row already had. 8 bytes of memory a document."""
        keys = np.frombuffer(self._keys, dtype=np.uint64)
        keys.sort()  # in place: a copy would be the largest thing in memory
        return self._rows_seen - int(np.count_nonzero(keys[1:] != keys[:-1])) - bool(len(keys))

    def commit(self, manifest: dict[str, Any], report: dict[str, Any]) -> None:
        """Finish the shards, write report and manifest, and put the folder in its place."""
        with self._writing():
            self._commit(manifest, report)

    def _commit(self, manifest: dict[str, Any], report: dict[str, Any]) -> None:
        self._finish_shard()
        _write_json(self._folder / REPORT, report)
        _write_json(self._folder / MANIFEST, {"format": FORMAT, **manifest, "shards": self._shards})
        _sync(self._folder)
        if self._final.exists():
            # A folder cannot be replaced by rename in one step; the old store is moved aside first.
            retired = self._final.with_name(f".{self._final.name}.old")
            shutil.rmtree(retired, ignore_errors=True)
            self._final.rename(retired)
            self._folder.rename(self._final)
            shutil.rmtree(retired)
        else:
            self._folder.rename(self._final)
        _sync(self._final.parent)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._final, "no store was written")

    def _shard_path(self) -> Path:
        return self._folder / f"shard-{len(self._shards):05d}.arrow"

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        path = self._shard_path()
        _sync(path)
        size, sha256 = path.stat().st_size, hash_file(path)
        self._shards.append(
            {"file": path.name, "rows": self._rows, "tokens": self._tokens, "bytes": size, "sha256": sha256}
        )
        self._rows = self._tokens = 0


def record_batch(entries: Sequence[Entry]) -> pa.RecordBatch:
    """Documents in the columns of a shard."""
    ids = [entry.document.input_ids for entry in entries]
    spans = [_runs(entry.document.supervised) for entry in entries]
    columns = [
        _list_array(ids),
        _list_array(spans),
        pa.array([entry.key for entry in entries], pa.uint64()),
        pa.array([entry.source for entry in entries], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _list_array(rows: Sequence[np.ndarray]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([_NONE, *rows]), pa.int32()))


def _runs(supervised: np.ndarray) -> np.ndarray:
    """Start and end of every run of True, int32 [2 * runs]."""
    padded = np.concatenate([[False], supervised, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).astype(np.int32)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
