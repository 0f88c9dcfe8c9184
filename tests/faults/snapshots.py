"""Small snapshots whose content follows from the step, and what a test expects of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftline.checkpoint import Checkpointer, Identity, Loaded, Snapshot
from draftline.checkpoint.files import CheckpointFileSystem

IDENTITY = Identity(config={"optim": {"lr": 6e-4, "steps": 100}, "seed": 3}, data={"sha256": "ab" * 32})


def snapshot(step: int, width: int = 4) -> Snapshot:
    """State after `step` steps: weights, moments, a config, metrics."""
    return Snapshot(
        step=step,
        row=8 * step,
        tensors={
            "model.safetensors": {
                "fc.weight": values(step, width).bfloat16(),
                "norm.weight": values(step + 1, 3),
            },
            "optimizer.safetensors": {"fc.weight.exp_avg": values(step + 2, width)},
        },
        texts={"config.json": '{"architectures": ["DFlashDraftModel"]}\n'},
        meta={"loss_sum": 0.1 * step, "schedule_step": step},
        world={"targets": 2, "drafters": 1},
    )


def values(seed: int, width: int) -> Tensor:
    """[width, width] normal numbers of that seed."""
    return torch.randn(width, width, generator=torch.Generator().manual_seed(seed))


def checkpointer(root: Path, fs: CheckpointFileSystem | None = None, keep: int = 2) -> Checkpointer:
    return Checkpointer(root, IDENTITY, keep=keep, write_timeout_s=20, fs=fs)


def save_steps(root: Path, *steps: int, fs: CheckpointFileSystem | None = None) -> None:
    """Save these steps, each complete before the next."""
    with checkpointer(root, fs) as saver:
        saver.load_latest()
        for step in steps:
            saver.save(snapshot(step))
            saver.wait()


def resume(root: Path) -> Loaded | None:
    return checkpointer(root).load_latest()


def assert_is_step(loaded: Loaded | None, step: int) -> None:
    """Every tensor, text and number of the loaded checkpoint equals that step's snapshot."""
    assert loaded is not None
    expected = snapshot(step)
    assert (loaded.step, loaded.row) == (expected.step, expected.row)
    assert loaded.texts == expected.texts
    assert loaded.meta == expected.meta
    assert loaded.world == expected.world
    assert loaded.tensors.keys() == expected.tensors.keys()
    for file, tensors in expected.tensors.items():
        assert loaded.tensors[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(loaded.tensors[file][name], tensor), f"{file}: {name}"
