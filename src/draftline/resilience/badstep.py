"""A step that was not finite, saved when it happens so that `draftline replay` can compute it again.

What is saved is all that its loss and gradient follow from: the rows, the drafter's compute weights and the
settings that name the target. The target's hidden states are computed again. The folder is written and verified
as a checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftline.checkpoint import Snapshot, read_checkpoint
from draftline.checkpoint.files import CheckpointFileSystem
from draftline.checkpoint.layout import checkpoint_name, steps_in
from draftline.checkpoint.manifest import MANIFEST
from draftline.checkpoint.write import write_checkpoint
from draftline.config import DrafterSpec, RunConfig
from draftline.data.rows import Row
from draftline.data.transfer import STEP_TENSORS
from draftline.errors import CheckpointError, ConfigError, NonFiniteError
from draftline.pipeline.engine import BadStep
from draftline.resilience.folder import CHECKPOINTS
from draftline.resilience.fsio import disk_failures_explained, make_folders, remove_tree, require_space
from draftline.resilience.result import RESULT
from draftline.setup import Prepared
from draftline.target.forward import Form

FOLDER = "not-finite"
"""Folder of saved steps in a run's output folder."""
WHERE_STEPS_LIE = (
    f"saved steps lie in {FOLDER}/ of a run that ended with exit code {NonFiniteError.exit_code}"
)
_WEIGHTS, _ROWS, _RUN, _SPEC = "weights.safetensors", "rows.safetensors", "run.json", "drafter.json"
_ROW_TENSORS = ("input_ids", *STEP_TENSORS)
"""Of a saved row: replay runs the target too, and a drafter's step reads no token ids."""


@contextmanager
def saved_for_replay(prepared: Prepared, config: RunConfig) -> Iterator[Callable[[BadStep], None]]:
    """Gives a function that saves a bad step; the NonFiniteError that then ends the block names its folder."""
    saved: list[Path] = []
    trouble: list[Exception] = []

    def keep(bad: BadStep) -> None:
        if saved or trouble:
            return  # another drafter's copy of the same step
        try:
            saved.append(save_bad_step(prepared, config, bad))
        except Exception as error:  # noqa: BLE001 - noted on the step's own error, which is the cause
            trouble.append(error)

    try:
        yield keep
    except NonFiniteError as error:
        if saved:
            error.saved = saved[0]
            error.add_note(
                f"`draftline replay {saved[0]}` computes it again and shows what is not finite, and where"
            )
        for other in trouble:
            error.add_note(f"and the step could not be saved for replay: {other}")
        raise


def save_bad_step(prepared: Prepared, config: RunConfig, bad: BadStep) -> Path:
    """Write the step into the run's folder; returns its own.

    Raises:
        DiskFullError, CheckpointError: the disk refused.
    """
    job, root = prepared.job, config.output / FOLDER
    rows = [job.source.row(index) for index in job.schedule.rows_of_step(bad.step)]
    snapshot = Snapshot(
        step=bad.step,
        row=rows[0].index,
        tensors={_WEIGHTS: bad.weights, _ROWS: {name: t for row in rows for name, t in _named(row).items()}},
        texts={_RUN: config.model_dump_json(), _SPEC: job.spec.model_dump_json()},
        meta={"rows": [row.index for row in rows], "form": job.form},
    )
    fs, place = CheckpointFileSystem(), root / checkpoint_name(bad.step)
    try:
        with disk_failures_explained(root, f"saving step {bad.step} for replay"):
            make_folders(fs, root)
            require_space(fs, root, snapshot.size)
            if place.exists():  # the same step of the same run, met again
                remove_tree(fs, place)
            write_checkpoint(fs, root, snapshot, prepared.identity)
    except BaseException:  # raised again: an empty folder would look like a saved step
        with suppress(OSError):  # steps that are there keep it
            root.rmdir()
        raise
    return place


def _named(row: Row) -> dict[str, Tensor]:
    tensors = {name: row.__dict__[name].clone() for name in _ROW_TENSORS}
    tensors |= {"starts": torch.tensor(row.starts), "documents": torch.tensor(row.documents)}
    return {f"{row.index}.{name}": tensor for name, tensor in tensors.items()}


def _row(index: int, tensors: Mapping[str, Tensor]) -> Row:
    named = {name: tensors[f"{index}.{name}"] for name in (*_ROW_TENSORS, "starts", "documents")}
    starts, documents = (tuple(named.pop(name).tolist()) for name in ("starts", "documents"))
    return Row(index=index, documents=documents, starts=starts, tables=(), **named)


@dataclass(frozen=True)
class SavedStep:
    """A saved step, read back."""

    step: int
    config: RunConfig
    spec: DrafterSpec
    form: Form
    rows: tuple[Row, ...]
    """Without attention tables."""
    weights: Mapping[str, Tensor]
    """The drafter's compute weights by name."""


def read_bad_step(folder: Path) -> SavedStep:
    """Read and verify a saved step.

    Raises:
        ConfigError: there is no such folder, or it is another; what is there is said.
        CheckpointError: it is damaged, or another kind of checkpoint.
    """
    _require_saved_step(folder)
    loaded = read_checkpoint(folder)
    if _ROWS not in loaded.tensors:
        raise CheckpointError(f"{folder} is no step saved for replay; {WHERE_STEPS_LIE}")
    return SavedStep(
        step=loaded.step,
        config=RunConfig.model_validate_json(loaded.texts[_RUN]),
        spec=DrafterSpec.model_validate_json(loaded.texts[_SPEC]),
        form=loaded.meta["form"],
        rows=tuple(_row(index, loaded.tensors[_ROWS]) for index in loaded.meta["rows"]),
        weights=loaded.tensors[_WEIGHTS],
    )


def _require_saved_step(folder: Path) -> None:
    """Say what is there instead of a saved step."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; {WHERE_STEPS_LIE}")
    if (folder / MANIFEST).is_file():
        return
    root = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    saved = [str(root / checkpoint_name(step)) for step in steps_in(root)]
    if (folder / CHECKPOINTS).is_dir() or (folder / RESULT).is_file() or folder.name == FOLDER:
        run = folder.parent if folder.name == FOLDER else folder
        if not saved:
            raise ConfigError(f"the run {run} has no saved step; {WHERE_STEPS_LIE}")
        raise ConfigError(
            f"{folder} is no saved step; the run {run} has {len(saved)}: {', '.join(saved)}. Name one"
        )
    raise ConfigError(f"{folder} is no saved step, nor a run: it has no {MANIFEST}; {WHERE_STEPS_LIE}")
