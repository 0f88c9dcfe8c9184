"""A disk that is full before a save, or becomes full at any call of it, costs that save and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoint import layout
from draftline.checkpoint.files import CheckpointFileSystem
from draftline.errors import CheckpointError, DiskFullError
from draftline.resilience import faults
from draftline.resilience.faults import Fault
from tests.faults.snapshots import assert_is_step, checkpointer, resume, save_steps, snapshot

WRITING_CALLS = ("make_folder", "write_bytes", "write_tensors", "sync_file", "sync_folder", "rename")
WIDE = 300
"""A snapshot of this width has 0.5 MiB, a sixteenth of the small disk."""


class FailingDisk(CheckpointFileSystem):
    """From call number `fail_at` on, whatever writes fails with `code` until `heal`; removing works."""

    def __init__(self, fail_at: int, code: int) -> None:
        self.fail_at, self.code, self.num_calls = fail_at, code, 0

    def heal(self) -> None:
        self.code = 0

    def __getattribute__(self, name: str) -> Any:
        if name in WRITING_CALLS:
            self._count(name)
        return super().__getattribute__(name)

    def _count(self, name: str) -> None:
        self.num_calls += 1
        if self.num_calls > self.fail_at and self.code:
            raise OSError(self.code, os.strerror(self.code), name)


class FillingDisk(CheckpointFileSystem):
    """Just before call number `fill_at`, somebody else fills the disk to the last byte."""

    def __init__(self, filler: Path, fill_at: int) -> None:
        self.filler, self.fill_at, self.num_calls = filler, fill_at, 0

    def __getattribute__(self, name: str) -> Any:
        if name in WRITING_CALLS:
            if self.num_calls == self.fill_at:
                fill(self.filler)
            self.num_calls += 1
        return super().__getattribute__(name)


def fill(path: Path, leave: int = 0) -> None:
    """Take all space of the disk but `leave` bytes."""
    with path.open("wb", buffering=0) as file:
        while (free := os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize) > leave:
            file.write(bytes(min(free - leave, 2**20)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", mount], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        # a disk that is really full needs a file system of its own; injected ENOSPC is tested beside it
        pytest.skip(f"mounting a tmpfs takes root, which this is not: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def save_one(root: Path, step: int, fs: CheckpointFileSystem | None = None) -> None:
    with checkpointer(root, fs) as saver:
        saver.load_latest()
        saver.save(snapshot(step, WIDE))


def test_a_save_does_not_begin_without_twice_its_size_free(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    save_one(root, 10)
    size = snapshot(20, WIDE).size
    fill(small_disk / "filler", leave=2 * size - 8192)
    with pytest.raises(DiskFullError, match=r"needs 1\.\d MiB") as caught:
        save_one(root, 20)
    assert caught.value.exit_code == 8
    assert [path.name for path in root.iterdir()] == ["step-000010"]


def test_a_disk_that_fills_up_at_any_call_of_a_save_costs_only_that_save(small_disk: Path) -> None:
    root, filler = small_disk / "checkpoints", small_disk / "filler"
    save_one(root, 10)
    refused = []
    for fill_at in range(15):
        step = 20 + fill_at
        try:
            save_one(root, step, FillingDisk(filler, fill_at))
        except DiskFullError as error:
            refused.append(str(error))
            assert not list(root.glob(".tmp-*"))
            assert layout.steps_in(root)[-1] < step
        filler.unlink(missing_ok=True)
    save_one(root, 100)
    assert len(refused) >= 4, "the first file, the second, the configuration and the manifest need space"
    assert all("writing the checkpoint of step" in message for message in refused)
    loaded = resume(root)
    assert loaded is not None
    assert loaded.step == 100
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, CheckpointError)],
)
def test_an_error_of_the_disk_at_any_call_is_raised_and_the_next_save_succeeds(
    tmp_path: Path, code: int, expected: type[Exception]
) -> None:
    for fail_at in range(12):
        root = tmp_path / str(fail_at)
        save_steps(root, 10, 20)
        disk = FailingDisk(fail_at, code)
        saver = checkpointer(root, disk)
        saver.load_latest()
        saver.save(snapshot(30))
        with pytest.raises(expected):
            saver.close()
        disk.heal()
        assert not list(root.glob(".tmp-*"))
        assert layout.steps_in(root)[:2] == [10, 20]
        save_steps(root, 40, fs=disk)
        assert_is_step(resume(root), 40)


def test_an_injected_full_disk_is_reported_like_a_real_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    full = Fault(worker="checkpoint", where="manifest", at=20, kind="enospc")
    with faults.armed(full) as plan, pytest.raises(DiskFullError):
        save_steps(root, 10, 20)
    assert plan.fired == [full]
    assert_is_step(resume(root), 10)
