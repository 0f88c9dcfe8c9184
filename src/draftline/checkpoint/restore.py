"""How a run resumes: the newest checkpoint whose every byte is what was written, or an error.

A checkpoint that fails verification is moved to `quarantine/` (the resumed run will want its name) and named
in the notes, once an older good one is found. When some existed and none is good, starting afresh would silently
throw the run away, so that is an error.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from draftline.checkpoint.best import BEST, Best, read_best
from draftline.checkpoint.layout import QUARANTINE, TRASH, checkpoint_name, steps_in
from draftline.checkpoint.manifest import Identity, Manifest, read_manifest, read_verified, require_same_run
from draftline.errors import CheckpointError
from draftline.resilience.fsio import TEMPORARY, FileSystem, disk_failures_explained, remove_tree
from draftline.resilience.sealed import DamagedError

_READERS = 4
"""Threads that read and hash: SHA-256 of one file keeps one core busy, the disk feeds several."""

_BROKEN = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO, errno.ENXIO)
"""Read failures that condemn a checkpoint; others, such as permissions, do not."""


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint."""

    path: Path
    step: int
    """Optimizer steps done."""
    row: int
    """Index of the next row."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name -> tensors, on the CPU."""
    texts: Mapping[str, str]
    """File name -> content."""
    meta: Mapping[str, Any]
    world: Mapping[str, Any]
    """Layout that wrote it."""
    notes: tuple[str, ...] = ()
    """What the user must hear: unfinished writes removed, checkpoints quarantined, steps repeated."""


@dataclass(frozen=True)
class Restored:
    """What a start found in a folder of checkpoints."""

    loaded: Loaded | None
    best: Best | None


def load_latest(fs: FileSystem, root: Path, identity: Identity) -> Restored:
    """Clear what a kill left behind and read the newest good checkpoint. The caller owns the folder's lock.

    Raises:
        CheckpointError: checkpoints exist and none is good, one is of a newer format, or the disk refuses.
        DiskFullError: the disk is so full that not even a folder can be made.
        OccupiedError: it belongs to a run with other settings or data.
    """
    with disk_failures_explained(root, "preparing to resume"):
        notes = _clear_leftovers(fs, root)
        loaded = _newest_good(fs, root, identity, notes)
        best = _checked_best(fs, root, notes)
    if loaded is None:
        return Restored(None, best)
    return Restored(replace(loaded, notes=tuple(notes)), best)


def refuse_other_run(root: Path, identity: Identity, *, partial: bool = False) -> Manifest | None:
    """Refuse checkpoints of another run, changing nothing: before the first file in their run's folder changes.

    Args:
        root: Folder of the checkpoints.
        identity: This run's, or what is known of it yet.
        partial: It is not all known yet; compare only the entries that it has.

    Returns:
        The newest manifest that can be read, whatever its files are worth; None where there is none.

    Raises:
        OccupiedError: settings or data differ; every differing key is listed with both values.
    """
    for step in reversed(steps_in(root)):
        folder = root / checkpoint_name(step)
        try:
            manifest = read_manifest(folder)
        except (DamagedError, CheckpointError, OSError):
            continue  # `load_latest` says what it is
        compared = _part_of(manifest, identity) if partial else manifest
        require_same_run(compared, identity, folder)
        return manifest
    return None


def _part_of(manifest: Manifest, identity: Identity) -> Manifest:
    known = {
        part: {
            name: value for name, value in getattr(manifest, part).items() if name in getattr(identity, part)
        }
        for part in ("config", "data")
    }
    return manifest.model_copy(update=known)


def _clear_leftovers(fs: FileSystem, root: Path) -> list[str]:
    """Remove unfinished writes and half-deleted checkpoints; only the owner of the folder may."""
    notes = []
    for path in sorted(root.iterdir()):
        if path.name.startswith((TEMPORARY, TRASH)):
            remove_tree(fs, path)
        if path.name.startswith(TEMPORARY) and path.name.removeprefix(TEMPORARY) != BEST:
            notes.append(f"removed {path.name}, a checkpoint whose write was cut off")
    return notes


def _newest_good(fs: FileSystem, root: Path, identity: Identity, notes: list[str]) -> Loaded | None:
    damaged: dict[str, DamagedError] = {}
    for step in reversed(steps_in(root)):
        try:
            loaded = _read(root / checkpoint_name(step), identity)
        except DamagedError as error:
            damaged[checkpoint_name(step)] = error
            continue
        notes += [_quarantine(fs, root, name, error) for name, error in damaged.items()]
        if damaged:
            notes.append(f"resumed from {checkpoint_name(step)}; the steps after it are trained again")
        return loaded
    if damaged:
        # They stay where they are: the same command, run again, must not find an empty folder and start afresh.
        reasons = "; ".join(f"{name}: {error}" for name, error in damaged.items())
        raise CheckpointError(
            f"{root}: none of the {len(damaged)} checkpoints is intact ({reasons}). Restore one from a copy, or "
            "choose a new output folder to start again"
        )
    return None


def _checked_best(fs: FileSystem, root: Path, notes: list[str]) -> Best | None:
    try:
        best = read_best(root)
    except DamagedError as error:
        notes.append(_quarantine(fs, root, BEST, error))
        return None
    if best is not None and best.step not in steps_in(root):
        notes.append(_quarantine(fs, root, BEST, f"it names step {best.step}, which is not there any more"))
        return None
    return best


def _quarantine(fs: FileSystem, root: Path, name: str, reason: object) -> str:
    """Move a bad entry away, keeping its bytes for inspection, and say so."""
    folder = root / QUARANTINE
    if not folder.exists():
        fs.make_folder(folder)
    place = next(path for n in count(1) if not (path := folder / f"{name}.{n}").exists())
    fs.rename(root / name, place)
    return f"{name} is damaged: {reason}; moved to {QUARANTINE}/{place.name}"


def read_checkpoint(folder: Path) -> Loaded:
    """Read and verify one checkpoint of any run, changing nothing; for export and evaluation.

    Raises:
        CheckpointError: it is missing, damaged, of a newer format or unreadable.
    """
    try:
        return _read(folder, None)
    except DamagedError as error:
        raise CheckpointError(f"{folder} is not an intact checkpoint: {error}") from None


def _read(folder: Path, identity: Identity | None) -> Loaded:
    with _damage_or_trouble(folder):
        if folder.is_symlink():
            raise DamagedError("it is a link, not a folder")
        manifest = read_manifest(folder)
    if identity is not None:
        if checkpoint_name(manifest.step) != folder.name:
            raise DamagedError(f"its manifest is of step {manifest.step}")
        require_same_run(manifest, identity, folder)
    with _damage_or_trouble(folder):
        return _read_files(folder, manifest)


def _read_files(folder: Path, manifest: Manifest) -> Loaded:
    def read(name: str) -> Mapping[str, Tensor] | str:
        data = read_verified(folder, name, manifest.files[name])
        return load(data) if manifest.files[name].kind == "tensors" else data.decode()

    with ThreadPoolExecutor(_READERS) as readers:
        contents = dict(zip(manifest.files, readers.map(read, manifest.files), strict=True))
    return Loaded(
        path=folder,
        step=manifest.step,
        row=manifest.row,
        tensors={name: content for name, content in contents.items() if not isinstance(content, str)},
        texts={name: content for name, content in contents.items() if isinstance(content, str)},
        meta=manifest.meta,
        world=manifest.world,
    )


@contextmanager
def _damage_or_trouble(folder: Path) -> Iterator[None]:
    """Tell damage, which the next older checkpoint answers, from trouble outside the checkpoint."""
    try:
        yield
    except (SafetensorError, ValueError) as error:
        raise DamagedError(str(error)) from None
    except OSError as error:
        where = Path(error.filename).name if error.filename else folder.name
        if error.errno in _BROKEN:
            raise DamagedError(f"{where}: {error.strerror}") from None
        raise CheckpointError(
            f"{folder} cannot be read: {where}: {error.strerror}. It was left alone; make it readable and "
            "run the same command again"
        ) from error
