"""An append-only JSONL file that survives a kill at any moment: rows are in it once, whole, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from draftline.data.output import writing
from draftline.errors import ConfigError, FolderInUseError

_ID = re.compile(rb'^\{"id": "([^"\\]+)"')
_SYNC_S = 1.0
"""Seconds of finished rows that a power cut may take (a kill takes none)."""


def lock_file(path: Path, mode: str, what: str) -> IO[bytes]:
    """Open a file that only one process may hold; the kernel frees it however that process ends.

    Raises:
        FolderInUseError: another process holds it; `what` says what it writes.
    """
    file: IO[bytes] = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderInUseError(f"another process writes {what}; wait for it or name another output") from None
    return file


class Journal:
    """Rows by id, in the order in which they were finished.

    Its methods raise DiskFullError when there is no room left, ConfigError when the file cannot be written.
    Opening it drops a last line that was cut off by a kill, and reads the ids that are there. One process at a
    time: the file is locked.
    """

    def __init__(self, path: Path, made_by: dict[str, Any]) -> None:
        """Name the file and the settings that its rows must have been made with."""
        self.path = path
        self.ids: set[str] = set()
        """Ids of the rows that are in the file."""
        self._made_by = made_by
        self._file: IO[bytes] | None = None
        self._synced = 0.0

    def __enter__(self) -> Self:
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = lock_file(self.path, "a+b", str(self.path))
        try:
            with self._writing():
                self._read(file)
        except BaseException:  # raised again: the lock must not outlive a journal that could not be read
            file.close()
            raise
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            with self._writing():
                self._sync()
        finally:
            with suppress(OSError):  # what could not be written has just been said
                self._file.close()
            self._file = None

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row; its first key is `id`."""
        assert self._file is not None
        assert row["id"] not in self.ids
        with self._writing():
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()
            self.ids.add(row["id"])
            if time.monotonic() - self._synced > _SYNC_S:
                self._sync()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "the rows that were finished before are kept")

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _read(self, file: IO[bytes]) -> None:
        file.seek(0)
        whole = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            self._check(number, line)
            whole += len(line)
        file.truncate(whole)
        file.seek(0, os.SEEK_END)

    def _check(self, number: int, line: bytes) -> None:
        found = _ID.match(line)
        if found is None:
            raise ConfigError(
                f"{self.path}:{number} was not written by this command; name another output file"
            )
        if number == 1:
            self._refuse_other_settings(json.loads(line).get("made_by", {}))
        self.ids.add(found[1].decode())

    def _refuse_other_settings(self, theirs: dict[str, Any]) -> None:
        differing = [
            f"{name}={theirs.get(name)!r} (now {self._made_by.get(name)!r})"
            for name in sorted(theirs.keys() | self._made_by.keys())
            if theirs.get(name) != self._made_by.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path} holds rows made with other settings: {', '.join(differing)}; use the same, "
                "or name another output file"
            )
