"""One run per output folder.

The owner holds a `flock` on `.lock`, which the kernel frees at its death however it dies, and describes
itself in `owner.json`. Network file systems may not carry a `flock` to other hosts; there a heartbeat (the
time of `owner.json` moves on) tells a living owner from a dead one, without comparing two clocks.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from draftline.config import Frozen
from draftline.console import tell
from draftline.errors import ConfigError, FolderInUseError
from draftline.resilience.fsio import FileSystem, disk_failures_explained, make_folders, replace_bytes
from draftline.resilience.names import UnsafeNameError, read_regular

LOCK = ".lock"
OWNER = "owner.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, inside its output folder."""
METRICS = "metrics.jsonl"
"""A run's metrics, inside its output folder."""
BEAT_S = 4.0
"""Seconds between heartbeats."""
_MISSED_BEATS = 3
"""Heartbeats that a living owner may miss."""

_held: set[int] = set()
os.register_at_fork(after_in_child=lambda: [os.close(descriptor) for descriptor in _held])


class Owner(Frozen):
    """Who uses a folder."""

    host: str
    pid: int
    run_id: str
    started: str
    """UTC, for people only."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run_id}, started {self.started})"


class RunFolder:
    """Ownership of an output folder, as a context manager."""

    def __init__(self, path: Path, run_id: str, beat_s: float = BEAT_S, host: str | None = None) -> None:
        """Name the folder; nothing is touched yet.

        Args:
            path: Output folder; created with its parents.
            run_id: Shown to whoever finds the folder in use.
            beat_s: Seconds between heartbeats.
            host: This machine's name; replaced by tests only.
        """
        self.path, self._beat_s = path, beat_s
        self._owner = Owner(
            host=host or socket.gethostname(),
            pid=os.getpid(),
            run_id=run_id,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._descriptor: int | None = None
        self._released = threading.Event()

    def __enter__(self) -> Self:
        """Take the folder.

        Raises:
            FolderInUseError: another process owns it; it is named.
            ConfigError: the folder cannot be created or locked.
            DiskFullError: there is no room for the record.
        """
        descriptor = _open_lock(self.path)
        try:
            _lock(descriptor, self.path)
            _require_no_distant_owner(self.path, self._owner.host, self._beat_s)
            self._describe()
        except BaseException:  # raised again: the lock must not outlive a refusal
            os.close(descriptor)
            raise
        _held.add(descriptor)
        self._descriptor = descriptor
        threading.Thread(target=self._beat, name="folder heartbeat", daemon=True).start()
        return self

    def _describe(self) -> None:
        with disk_failures_explained(self.path, "recording the owner"):
            replace_bytes(FileSystem(), self.path / OWNER, self._owner.model_dump_json(indent=1).encode())

    def _beat(self) -> None:
        # A folder that was removed is found by whoever writes into it next, with a better message.
        with suppress(OSError):
            while not self._released.wait(self._beat_s):
                os.utime(self.path / OWNER)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the folder back. `.lock` stays: removing it would let two processes lock two files."""
        assert self._descriptor is not None
        self._released.set()
        (self.path / OWNER).unlink(missing_ok=True)
        _held.discard(self._descriptor)
        os.close(self._descriptor)


def newest_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint of a run by its name alone, unread; for a process that imports no torch."""
    found = (output / CHECKPOINTS).glob("step-" + "[0-9]" * 6 + "*")
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def _open_lock(folder: Path) -> int:
    try:
        make_folders(FileSystem(), folder)
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"output={folder} cannot be used: {error.strerror}; choose another folder"
        ) from error


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = read_owner(folder) or "a process that has not described itself yet"
        raise FolderInUseError(
            f"{folder} is in use by {owner}; stop it or choose another output folder"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"output={folder} cannot be locked ({error.strerror}), so two runs could mix in it; choose a "
            "folder on a file system with flock"
        ) from error


def read_owner(folder: Path) -> Owner | None:
    """The recorded owner, dead or alive; None without a readable record."""
    try:
        return Owner.model_validate_json(read_regular(folder, OWNER, 4096))
    except (FileNotFoundError, UnsafeNameError, ValidationError):
        return None


def _require_no_distant_owner(folder: Path, host: str, beat_s: float) -> None:
    """Refuse if an owner on another host is alive although we got the lock."""
    owner = read_owner(folder)
    if owner is None or owner.host == host:
        return
    tell(f"{folder} was last used by {owner}; waiting to see whether it is alive")
    seen, give_up = _beats(folder), time.monotonic() + _MISSED_BEATS * beat_s
    while time.monotonic() < give_up:
        time.sleep(beat_s / 4)
        if _beats(folder) != seen:
            raise FolderInUseError(f"{folder} is in use by {owner}; stop it or choose another output folder")


def _beats(folder: Path) -> int | None:
    """A number that a living owner keeps changing. Opening the file makes network file systems look again."""
    try:
        with (folder / OWNER).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
