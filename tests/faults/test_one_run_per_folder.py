"""Two processes never write into one folder, and a dead owner never blocks the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from draftline.errors import ConfigError, FolderInUseError
from draftline.resilience.folder import OWNER, RunFolder, read_owner
from tests.faults.real_runs import settings, train_here

HOLD = """
import sys, time
from pathlib import Path
from draftline.resilience.folder import RunFolder
with RunFolder(Path(sys.argv[1]), "first"):
    {inside}
    print("held", flush=True)
    time.sleep(60)
"""
# The owner says "held" only once its child has started, or the child might still be about to let go.
FORK = "import os; r, w = os.pipe(); os.fork() == 0 and (os.write(w, b'x'), time.sleep(60)); os.read(r, 1)"


@contextmanager
def another_process_holds(folder: Path, inside: str = "pass") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD.format(inside=inside), folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_the_second_process_is_refused_and_told_who_owns_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with another_process_holds(folder) as process, pytest.raises(FolderInUseError) as caught:
        RunFolder(folder, "second").__enter__()
    assert caught.value.exit_code == 3
    assert f"process {process.pid} on {os.uname().nodename} (run first, started 2" in str(caught.value)


def test_the_folder_is_free_as_soon_as_its_owner_is_killed(tmp_path: Path) -> None:
    with another_process_holds(tmp_path / "run") as process:
        process.kill()
        process.wait()
        with RunFolder(tmp_path / "run", "second"):
            owner = read_owner(tmp_path / "run")
    assert owner is not None
    assert (owner.pid, owner.run_id) == (os.getpid(), "second")


def test_a_forked_child_that_outlives_a_killed_owner_does_not_keep_the_folder(tmp_path: Path) -> None:
    with another_process_holds(tmp_path / "run", FORK) as process:
        process.kill()
        process.wait()
        with RunFolder(tmp_path / "run", "second"):
            pass


def test_a_folder_that_was_given_back_may_be_taken_again(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with RunFolder(tmp_path / "run", name), pytest.raises(FolderInUseError):
            RunFolder(tmp_path / "run", "meanwhile").__enter__()
        assert not (tmp_path / "run" / OWNER).exists()


def test_an_owner_on_another_host_that_still_beats_is_respected_though_its_lock_is_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_of_another_host(tmp_path)
    stop = threading.Event()
    threading.Thread(target=beat_as_another_host, args=(tmp_path, stop), daemon=True).start()
    with pytest.raises(FolderInUseError, match="on far-away"), RunFolder(tmp_path, "second", beat_s=0.2):
        pass
    stop.set()
    assert "last used by process 77 on far-away" in capsys.readouterr().err


def test_an_owner_on_another_host_that_no_longer_beats_is_replaced_whatever_its_clock_says(
    tmp_path: Path,
) -> None:
    record_of_another_host(tmp_path)
    os.utime(tmp_path / OWNER, (2**33, 2**33))
    started = time.monotonic()
    with RunFolder(tmp_path, "second", beat_s=0.1):
        assert time.monotonic() - started > 0.25
        owner = read_owner(tmp_path)
    assert owner is not None
    assert owner.run_id == "second"


def record_of_another_host(folder: Path) -> None:
    (folder / OWNER).write_text('{"host": "far-away", "pid": 77, "run_id": "first", "started": "2030-01-01"}')


def beat_as_another_host(folder: Path, stop: threading.Event) -> None:
    with suppress(FileNotFoundError):  # when the record is taken over
        while not stop.wait(0.05):
            os.utime(folder / OWNER)


def test_the_owner_keeps_beating(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "first", beat_s=0.05):
        before = (tmp_path / OWNER).stat().st_mtime_ns
        deadline = time.monotonic() + 5
        while (tmp_path / OWNER).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("record", ["", "{", "[]", '{"host": 1}', "\0" * 100])
def test_an_unreadable_record_blocks_nobody(tmp_path: Path, record: str) -> None:
    (tmp_path / OWNER).write_text(record)
    with RunFolder(tmp_path, "second"):
        assert read_owner(tmp_path) is not None


def test_a_folder_that_cannot_be_made_is_a_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output=") as caught, RunFolder(tmp_path / "file" / "run", "x"):
        pass
    assert caught.value.exit_code == 2


def test_no_thread_and_no_descriptor_is_left_after_the_run(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), num_descriptors()
    for number in range(5):
        with RunFolder(tmp_path, str(number), beat_s=0.05):
            pass
    deadline = time.monotonic() + 5
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
    assert num_descriptors() == descriptors


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_second_training_run_is_refused_and_leaves_the_first_ones_result_alone(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of the first run")
    with RunFolder(tmp_path, "first"), pytest.raises(FolderInUseError, match=f"process {os.getpid()} on"):
        train_here(settings(tmp_path))
    assert (tmp_path / "result.json").read_text() == "of the first run"
    assert not (tmp_path / "checkpoints").exists()
