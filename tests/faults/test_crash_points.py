"""The writer is stopped before each of its calls, and the power cut keeps any part of what was not synced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline.checkpoint import layout, read_checkpoint
from draftline.checkpoint.best import Best, read_best, write_best
from draftline.checkpoint.restore import load_latest
from draftline.checkpoint.write import retire, write_checkpoint
from draftline.errors import CheckpointError
from tests.faults.disk import PowerCut, PowerCutDisk
from tests.faults.snapshots import IDENTITY, assert_is_step, resume, save_steps, snapshot


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two") / "checkpoints"
    save_steps(root, 10, 20)
    assert layout.steps_in(root) == [10, 20]
    return root


def write_and_retire(disk: PowerCutDisk, step: int) -> None:
    write_checkpoint(disk, disk.root, snapshot(step), IDENTITY)
    retire(disk, disk.root, keep=2, also_keep=None)


def disk_on_copy(template: Path, folder: Path, **options: int | None) -> PowerCutDisk:
    root = folder / "-".join(f"{name}-{value}" for name, value in options.items()) / "checkpoints"
    shutil.copytree(template, root)
    return PowerCutDisk(root, **options)


def calls_of_a_save(template: Path, folder: Path) -> list[str]:
    disk = disk_on_copy(template, folder, stop_at=None)
    write_and_retire(disk, 30)
    return disk.calls


def loss_after(disk: PowerCutDisk, promised: set[int]) -> str | None:
    """What a power cut now could break of the promises, or None: tried for every way it may go."""
    for root in disk.survivors(disk.root.parent):
        steps = layout.steps_in(root)
        if len(steps) < 2 or steps[-1] not in promised:
            return f"{steps} are left"
        try:
            for step in steps:
                assert_is_step(read_checkpoint(root / layout.checkpoint_name(step)), step)
        except CheckpointError as error:
            return f"a cut-off checkpoint looks whole: {error}"
        assert_is_step(resume(root), steps[-1])
    return None


def losses_of_a_save(template: Path, folder: Path, calls: int, skip: int | None) -> Iterator[str]:
    """Losses at every crash point of a save in which the sync that is call `skip` was forgotten."""
    finished = disk_on_copy(template, folder, stop_at=None, skip=skip)
    write_and_retire(finished, 30)
    if loss := loss_after(finished, {30}):
        yield f"finished: {loss}"
    for stop_at in range(calls):
        disk = disk_on_copy(template, folder, stop_at=stop_at, skip=skip)
        with pytest.raises(PowerCut):
            write_and_retire(disk, 30)
        if loss := loss_after(disk, {20, 30}):
            yield f"before call {stop_at}: {loss}"


def test_a_cut_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint_whole(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    calls = calls_of_a_save(two_checkpoints, tmp_path)
    assert len(calls) > 15
    assert list(losses_of_a_save(two_checkpoints, tmp_path, len(calls), skip=None)) == []


def test_forgetting_any_single_sync_of_a_save_could_lose_a_checkpoint(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    calls = calls_of_a_save(two_checkpoints, tmp_path)
    syncs = [number for number, call in enumerate(calls) if call.startswith("sync_")]
    assert len(syncs) >= 6
    for skip in syncs:
        losses = losses_of_a_save(two_checkpoints, tmp_path, len(calls), skip)
        assert next(losses, None) is not None, f"{calls[skip]} (call {skip}) is not needed, or not tested"


def test_a_finished_save_survives_any_cut_even_before_older_ones_are_retired(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    disk = disk_on_copy(two_checkpoints, tmp_path, stop_at=None)
    write_checkpoint(disk, disk.root, snapshot(30), IDENTITY)
    assert loss_after(disk, {30}) is None


def test_a_second_cut_while_resuming_from_the_first_loses_nothing_more(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    broken = disk_on_copy(two_checkpoints, tmp_path / "first", stop_at=7)
    with pytest.raises(PowerCut):
        write_and_retire(broken, 30)
    (broken.root / "step-000020" / "config.json").write_text("{}")
    (broken.root / ".trash-step-000005").mkdir()
    for stop_at in range(50):
        disk = disk_on_copy(broken.root, tmp_path, stop_at=stop_at)
        try:
            load_latest(disk, disk.root, IDENTITY)
        except PowerCut:
            for root in disk.survivors(disk.root.parent):
                assert_is_step(resume(root), 10)
        else:
            assert stop_at > 5
            return
    pytest.fail("resuming never finished")


def test_the_pointer_to_the_best_checkpoint_is_the_old_or_the_new_one(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    template = disk_on_copy(two_checkpoints, tmp_path, stop_at=None)
    old, new = Best(step=10, figure=3.5), Best(step=20, figure=4.25)
    write_best(template, template.root, old)
    for stop_at in range(5):
        disk = disk_on_copy(template.root, tmp_path, stop_at=stop_at)
        try:
            write_best(disk, disk.root, new)
            allowed = (new,)
        except PowerCut:
            allowed = (old, new)
        for root in disk.survivors(disk.root.parent):
            assert read_best(root) in allowed


def test_the_folder_of_checkpoints_itself_survives_the_first_save(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    disk = PowerCutDisk(run)
    save_steps(run / "new" / "checkpoints", 10, fs=disk)
    for survivor in disk.survivors(tmp_path):
        assert_is_step(resume(survivor / "new" / "checkpoints"), 10)
