"""The syncs that the simulated disk counts are real: the kernel is asked for them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.checkpoint.write import write_checkpoint
from tests.faults.snapshots import IDENTITY, snapshot


def test_every_file_and_folder_of_a_checkpoint_is_synced_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def recording_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    write_checkpoint(CheckpointFileSystem(), tmp_path, snapshot(10), IDENTITY)
    for path in (tmp_path, *tmp_path.rglob("*")):
        assert path.stat().st_ino in synced, path
    assert stat.S_ISDIR(tmp_path.stat().st_mode)
