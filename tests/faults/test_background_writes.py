"""One checkpoint is written behind the training; whatever becomes of it is known at the next call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftline.checkpoint import Best, Checkpointer, Snapshot, layout
from draftline.checkpoint.files import CheckpointFileSystem
from draftline.errors import Blame, CheckpointError, DiskFullError, StallError, blame_of
from draftline.resilience import faults
from draftline.resilience.faults import Fault, InjectedFaultError
from draftline.resilience.folder import newest_checkpoint
from tests.faults.snapshots import IDENTITY, assert_is_step, checkpointer, resume, save_steps, snapshot


class HeldDisk(CheckpointFileSystem):
    """Writing tensors waits until `release` is set."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.begun.set()
        assert self.release.wait(20)
        super().write_tensors(path, tensors)


def save_and_leave(root: Path, state: Snapshot, error: Exception | None = None) -> None:
    """Start one save and leave the block at once, with `error` if given."""
    with checkpointer(root) as saver:
        saver.load_latest()
        saver.save(state)
        if error is not None:
            raise error


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    disk = HeldDisk()
    with checkpointer(tmp_path / "checkpoints", disk) as saver:
        saver.load_latest()
        saver.save(snapshot(10))
        assert disk.begun.wait(5)
        saver.check()
        disk.release.set()
    assert_is_step(resume(tmp_path / "checkpoints"), 10)


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    disk = HeldDisk()
    with checkpointer(tmp_path / "checkpoints", disk) as saver:
        saver.load_latest()
        saver.save(snapshot(10))
        threading.Timer(0.2, disk.release.set).start()
        started = time.monotonic()
        saver.save(snapshot(20))
        assert time.monotonic() - started > 0.15
    assert layout.steps_in(tmp_path / "checkpoints") == [10, 20]


def test_a_write_that_hangs_ends_the_run_at_its_deadline(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Checkpointer(tmp_path / "checkpoints", IDENTITY, keep=2, write_timeout_s=0.3, fs=disk)
    saver.load_latest()
    saver.save(snapshot(10))
    started = time.monotonic()
    with pytest.raises(StallError, match=r"step 10 was not written within 0\.3 s"):
        saver.save(snapshot(20))
    with pytest.raises(StallError):
        saver.close()
    assert time.monotonic() - started < 2
    disk.release.set()


def test_a_write_past_its_deadline_is_noticed_without_waiting_for_it(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Checkpointer(tmp_path / "checkpoints", IDENTITY, keep=2, write_timeout_s=0.2, fs=disk)
    saver.load_latest()
    saver.save(snapshot(10))
    saver.check()
    assert saver.writing
    time.sleep(0.3)
    with pytest.raises(StallError, match="slow or hanging") as caught:
        saver.check()
    assert "write_tensors" in (caught.value.stacks or ""), "where the writer hangs"
    disk.release.set()


def test_the_newest_checkpoint_is_known_once_the_folder_was_checked(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_steps(root, 10, 20)
    saver = checkpointer(root)
    assert saver.newest is None, "nobody has looked at its bytes yet"
    saver.load_latest()
    assert saver.newest == root / "step-000020"
    assert newest_checkpoint(tmp_path) == root / "step-000020"
    assert newest_checkpoint(tmp_path / "elsewhere") is None


def test_a_folder_that_was_removed_under_a_run_is_told_with_a_sentence(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    saver = checkpointer(root)
    saver.load_latest()
    root.rmdir()
    with pytest.raises(CheckpointError, match="is gone: it was removed while the run wrote to it"):
        saver.save(snapshot(10))
    assert saver.newest is None, "what ends the run is told, not that nothing can be resumed"


def test_room_for_all_checkpoints_that_stay_is_asked_for_before_a_run(tmp_path: Path) -> None:
    class SmallDisk(CheckpointFileSystem):
        def free_bytes(self, path: Path) -> int:  # noqa: ARG002 - whatever the folder
            return 100

    saver = checkpointer(tmp_path / "checkpoints", SmallDisk(), keep=3)
    saver.load_latest()
    saver.require_room(25)
    with pytest.raises(DiskFullError, match="this run's checkpoints need"):
        saver.require_room(26)
    save_steps(tmp_path / "checkpoints", 10, 20, 30)
    saver.require_room(50)  # they are there: one more, and the margin of every write
    with pytest.raises(DiskFullError):
        saver.require_room(51)


def test_a_full_disk_can_be_forgiven_and_nothing_else_can(tmp_path: Path) -> None:
    full = Fault(worker="checkpoint", where="file", at=10, kind="enospc")
    broken = Fault(worker="checkpoint", where="file", at=30, kind="raise")
    with faults.armed(full, broken):
        saver = checkpointer(tmp_path / "checkpoints")
        saver.load_latest()
        saver.save(snapshot(10))
        with pytest.raises(DiskFullError) as caught:
            saver.wait()
        assert blame_of(caught.value) == Blame("checkpoint", 80)
        saver.forgive()
        saver.save(snapshot(20))
        saver.save(snapshot(30))
        with pytest.raises(InjectedFaultError):
            saver.wait()
        saver.forgive()
        with pytest.raises(InjectedFaultError):
            saver.check()
    assert_is_step(resume(tmp_path / "checkpoints"), 20)


@pytest.mark.parametrize("call", ["check", "wait", "save", "close"])
def test_the_error_of_a_background_write_is_raised_by_the_next_call_whichever_it_is(
    tmp_path: Path, call: str
) -> None:
    with faults.armed(Fault(worker="checkpoint", where="rename", at=20, kind="raise")):
        saver = checkpointer(tmp_path / "checkpoints")
        saver.load_latest()
        saver.save(snapshot(10))
        saver.save(snapshot(20))
        if call == "check":
            wait_for_thread_to_end("checkpoint")
        with pytest.raises(InjectedFaultError):
            saver.save(snapshot(30)) if call == "save" else getattr(saver, call)()
        with pytest.raises(InjectedFaultError):
            saver.close()
    assert_is_step(resume(tmp_path / "checkpoints"), 10)


def wait_for_thread_to_end(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)


def test_leaving_the_block_raises_what_the_last_write_failed_with(tmp_path: Path) -> None:
    fault = Fault(worker="checkpoint", where="file", at=10, kind="raise")
    with faults.armed(fault), pytest.raises(InjectedFaultError):
        save_and_leave(tmp_path / "checkpoints", snapshot(10))


def test_a_failed_write_does_not_hide_the_error_that_ended_the_run(tmp_path: Path) -> None:
    fault = Fault(worker="checkpoint", where="file", at=10, kind="raise")
    with faults.armed(fault), pytest.raises(ZeroDivisionError) as caught:
        save_and_leave(tmp_path / "checkpoints", snapshot(10), error=ZeroDivisionError())
    assert caught.value.__notes__ == ["and the last checkpoint failed: injected at checkpoint.file(10)"]


def test_the_write_in_flight_is_finished_when_the_run_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        save_and_leave(tmp_path / "checkpoints", snapshot(10), error=ZeroDivisionError())
    assert_is_step(resume(tmp_path / "checkpoints"), 10)


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    save_steps(root := tmp_path / "checkpoints", 10, 20, 30, 40)
    assert sorted(path.name for path in root.iterdir()) == ["step-000030", "step-000040"]


def test_the_best_checkpoint_stays_until_a_better_one_comes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with checkpointer(root) as saver:
        saver.load_latest()
        for step, figure, is_best in [(10, 3.0, True), (20, 4.0, True), (30, 3.9, False), (40, 4.0, False)]:
            saver.save(snapshot(step))
            assert saver.mark_best(step, figure) is is_best
    assert layout.steps_in(root) == [20, 30, 40]
    with checkpointer(root) as saver:
        assert_is_step(saver.load_latest(), 40)
        assert saver.best == Best(step=20, figure=4.0)
        saver.save(snapshot(50))
        assert saver.mark_best(40, 4.1)
        saver.save(snapshot(60))
        saver.save(snapshot(70))
    assert layout.steps_in(root) == [40, 60, 70]


def test_a_checkpoint_that_was_retired_before_its_figure_came_is_not_marked(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "checkpoints") as saver:
        saver.load_latest()
        for step in (10, 20, 30):
            saver.save(snapshot(step))
        assert not saver.mark_best(10, 9.0)
        assert saver.best is None


def test_a_damaged_pointer_to_the_best_checkpoint_is_told_and_not_believed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with checkpointer(root) as saver:
        saver.load_latest()
        saver.save(snapshot(10))
        saver.mark_best(10, 3.0)
    (root / "best.json").write_text((root / "best.json").read_text().replace("3.0", "9.0"))
    saver = checkpointer(root)
    loaded = saver.load_latest()
    assert_is_step(loaded, 10)
    assert loaded is not None
    assert "best.json is damaged" in loaded.notes[0]
    assert saver.best is None


def test_a_pointer_to_a_checkpoint_that_was_quarantined_is_dropped(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with checkpointer(root) as saver:
        saver.load_latest()
        saver.save(snapshot(10))
        saver.save(snapshot(20))
        saver.mark_best(20, 3.0)
    (root / "step-000020" / "config.json").unlink()
    saver = checkpointer(root)
    assert_is_step(saver.load_latest(), 10)
    assert saver.best is None


def test_a_cut_off_write_and_a_half_deleted_checkpoint_are_cleared_and_the_first_is_told(
    tmp_path: Path,
) -> None:
    save_steps(root := tmp_path / "checkpoints", 10)
    for name in (".tmp-77-20", ".trash-step-000005"):
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(b"half")
    loaded = resume(root)
    assert_is_step(loaded, 10)
    assert loaded is not None
    assert loaded.notes == ("removed .tmp-77-20, a checkpoint whose write was cut off",)
    assert [path.name for path in root.iterdir()] == ["step-000010"]


def test_a_step_that_exists_is_not_written_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_steps(root, 20)
    with pytest.raises(CheckpointError, match="already holds step 20"):
        save_and_leave(root, snapshot(20))


@pytest.mark.parametrize(
    "bad",
    [
        {"texts": {"manifest.json": "{}"}},
        {"texts": {"model.safetensors": "{}"}},
        {"texts": {"../config.json": "{}"}},
        {"meta": {"loss": math.nan}},
    ],
)
def test_a_snapshot_that_cannot_be_written_is_refused_in_the_callers_thread(
    tmp_path: Path, bad: dict
) -> None:
    tensors = {"model.safetensors": {"w": torch.zeros(2)}}
    with pytest.raises(ValueError, match=r"name|JSON"):
        save_and_leave(tmp_path / "checkpoints", Snapshot(step=1, row=8, tensors=tensors, **bad))


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "checkpoints") as saver:
        saver.load_latest()
        saver.save(snapshot(10))
        with pytest.raises(ValueError, match="not finite"):
            saver.mark_best(10, math.nan)


def test_a_new_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    assert resume(tmp_path / "checkpoints") is None


def test_other_users_may_read_the_weights_as_far_as_the_umask_allows(tmp_path: Path) -> None:
    save_steps(root := tmp_path / "checkpoints", 10)
    ordinary = (root / "step-000010" / "config.json").stat().st_mode
    assert (root / "step-000010" / "model.safetensors").stat().st_mode == ordinary


def test_a_checkpoints_weights_are_a_plain_safetensors_file_with_its_configuration_beside_it(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    save_steps(root := tmp_path / "checkpoints", 10)
    weights = load_file(root / "step-000010" / "model.safetensors")
    expected = snapshot(10)
    assert weights.keys() == expected.tensors["model.safetensors"].keys()
    assert (root / "step-000010" / "config.json").read_text() == expected.texts["config.json"]
