"""The few calls by which durable state is written, and what a full disk means.

Whatever must survive a power cut goes through a `FileSystem`, call by call, so that a test can stop after the
k-th call and drop everything that was not synced by then (tests/faults/disk.py). Reading needs no such care
and uses the operating system directly.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftline.errors import CheckpointError, DiskFullError

TEMPORARY = ".tmp-"
"""Prefix of what is being written; found at a start, it was cut off and is removed."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileSystem:
    """The real file system. Every method is one step between two crash points and raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Create one folder; its parent exists."""
        path.mkdir()

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Create or replace a file; the content is durable only after `sync_file` and `sync_folder`."""
        path.write_bytes(data)

    def sync_file(self, path: Path) -> None:
        """Force a file's content to the disk."""
        _sync(path, os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """Force a folder's entries (creations, renames, removals) to the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, source: Path, destination: Path) -> None:
        """Give a file or folder another name in one step; a file at the destination is replaced."""
        source.replace(destination)

    def remove_file(self, path: Path) -> None:
        """Remove one file or symbolic link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove one empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the disk that holds `path`."""
        return shutil.disk_usage(path).free


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_failures_explained(folder: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into the error that names its exit code.

    Raises:
        DiskFullError: no space or quota left on the disk of `folder`.
        CheckpointError: the disk refused for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"the disk of {folder} became full while {doing}; what was there before is untouched. "
                "Free some space and run the same command again"
            ) from error
        raise CheckpointError(
            f"{doing} in {folder} failed: {error}. What was there before is untouched"
        ) from error


def require_space(fs: FileSystem, folder: Path, size: int) -> None:
    """Refuse to start writing `size` bytes unless twice as much is free (the new copy, and a margin).

    Raises:
        DiskFullError: too little is free.
    """
    free = fs.free_bytes(folder)
    if free < 2 * size:
        raise DiskFullError(
            f"{folder} has {mib(free)} free and a checkpoint of {mib(size)} needs {mib(2 * size)}; free "
            "some space or choose another output folder. Checkpoints already there are untouched"
        )


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.1f} MiB"


def make_folders(fs: FileSystem, path: Path) -> None:
    """Create a folder and its missing parents, each durable before the next. One that exists is left alone."""
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        # Another process may start in the same place just now; the lock decides between us.
        with suppress(FileExistsError):
            fs.make_folder(folder)
        fs.sync_folder(folder.parent)


def remove_tree(fs: FileSystem, path: Path) -> None:
    """Remove a file, a link (never what it points to) or a folder with all it holds."""
    if path.is_symlink() or not path.is_dir():
        fs.remove_file(path)
        return
    for child in sorted(path.iterdir()):
        remove_tree(fs, child)
    fs.remove_folder(path)


def replace_bytes(fs: FileSystem, path: Path, data: bytes) -> None:
    """Replace a small file; a reader, at any moment or after a power cut, sees the old or the new content."""
    temporary = path.with_name(TEMPORARY + path.name)
    fs.write_bytes(temporary, data)
    fs.sync_file(temporary)
    fs.rename(temporary, path)
    fs.sync_folder(path.parent)
