"""The write protocol: a checkpoint that a kill, a power cut or a full disk can delay but never corrupt.

A checkpoint is a folder `step-NNNNNN` of safetensors and JSON files with, written last, `manifest.json`: the
SHA-256 of each. The folder gets its name only when everything in it is on the disk:

    .tmp-<pid>-<step>/   files, each synced -> manifest, synced -> folder synced
    step-NNNNNN/         renamed, parent synced -> older ones retired

so a reader (restore.py) sees whole checkpoints only, and `keep` of them at any moment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.checkpoint.layout import TRASH, checkpoint_name, steps_in
from draftline.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Identity, Manifest, encode_manifest
from draftline.resilience import faults
from draftline.resilience.fsio import TEMPORARY, FileSystem, remove_tree
from draftline.resilience.names import plain_name
from draftline.resilience.sealed import canonical

_HASHERS = 4
"""Threads that hash: SHA-256 of one file keeps one core busy."""


@dataclass(frozen=True)
class Snapshot:
    """The run's state at a step boundary, copied to the host; it must not change while it is written."""

    step: int
    """Optimizer steps done."""
    row: int
    """Index of the next row."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name (`*.safetensors`) -> contiguous CPU tensors that share no memory."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """File name -> content, such as the drafter's config.json."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON that the run wants back."""
    world: Mapping[str, Any] = field(default_factory=dict)
    """Layout that wrote it, such as {"targets": 5, "drafters": 3}."""

    @property
    def size(self) -> int:
        """Bytes of its tensors and texts."""
        tensors = (tensor for file in self.tensors.values() for tensor in file.values())
        return sum(tensor.nbytes for tensor in tensors) + sum(len(text) for text in self.texts.values())

    def require_writable(self) -> None:
        """Find a mistake in the caller's thread, where its traceback is useful, and not in the writer's.

        Raises:
            ValueError: a file name is unsafe or given twice, or `meta` or `world` holds a NaN.
            TypeError: `meta` or `world` is not JSON.
        """
        names = [MANIFEST, *self.tensors, *self.texts]
        if len(set(map(plain_name, names))) < len(names):
            raise ValueError(
                f"file names of a checkpoint must differ from each other and from {MANIFEST}: {names}"
            )
        canonical([self.meta, self.world])


def write_checkpoint(fs: CheckpointFileSystem, root: Path, snapshot: Snapshot, identity: Identity) -> None:
    """Write `step-NNNNNN` into `root`; it is complete and durable on return.

    Raises:
        OSError: the disk refused. The unfinished folder is removed, older checkpoints are untouched.
    """
    temporary = root / f"{TEMPORARY}{os.getpid()}-{snapshot.step}"
    try:
        fs.make_folder(temporary)
        _write_files(fs, temporary, snapshot)
        faults.point("checkpoint", "manifest", snapshot.step)
        _write_manifest(fs, temporary, snapshot, identity)
        faults.point("checkpoint", "rename", snapshot.step)
        fs.rename(temporary, root / checkpoint_name(snapshot.step))
    except Exception:  # whatever it was is raised again; only the half-written folder goes
        # What cannot be removed now, because the disk refuses that too, is removed at the next start.
        with suppress(OSError):
            remove_tree(fs, temporary)
        raise
    fs.sync_folder(root)


def _write_files(fs: CheckpointFileSystem, folder: Path, snapshot: Snapshot) -> None:
    for name, tensors in snapshot.tensors.items():
        faults.point("checkpoint", "file", snapshot.step)
        fs.write_tensors(folder / name, tensors)
        fs.sync_file(folder / name)
    for name, text in snapshot.texts.items():
        fs.write_bytes(folder / name, text.encode())
        fs.sync_file(folder / name)


def _write_manifest(fs: CheckpointFileSystem, folder: Path, snapshot: Snapshot, identity: Identity) -> None:
    manifest = Manifest(
        format=FORMAT,
        step=snapshot.step,
        row=snapshot.row,
        world=dict(snapshot.world),
        meta=dict(snapshot.meta),
        files=_describe(folder, snapshot),
        **identity.fields(),
    )
    fs.write_bytes(folder / MANIFEST, encode_manifest(manifest))
    fs.sync_file(folder / MANIFEST)
    fs.sync_folder(folder)


def _describe(folder: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file, read back from the disk's cache; hashed in parallel."""

    def describe(name: str) -> FileEntry:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            kind = "tensors" if name in snapshot.tensors else "text"
            return FileEntry(bytes=file.tell(), sha256=digest, kind=kind)

    names = [*snapshot.tensors, *snapshot.texts]
    with ThreadPoolExecutor(_HASHERS) as hashers:
        return dict(zip(names, hashers.map(describe, names), strict=True))


def retire(fs: FileSystem, root: Path, keep: int, also_keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `also_keep`. Raises OSError."""
    old = [checkpoint_name(step) for step in steps_in(root)[:-keep] if step != also_keep]
    if not old:
        return
    for name in old:
        fs.rename(root / name, root / f"{TRASH}{name}")
    # Removals that reach the disk before the new name would leave a checkpoint with holes.
    fs.sync_folder(root)
    for name in old:
        remove_tree(fs, root / f"{TRASH}{name}")
