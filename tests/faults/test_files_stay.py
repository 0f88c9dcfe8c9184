"""A finished file is never changed in place: who has mapped it, reads what was there, whatever the run does."""

from __future__ import annotations

import mmap
from pathlib import Path

from draftline.console import Bar, Screen
from tests.faults.real_runs import EVERY, settings, train_here

APPENDED = {"metrics.jsonl"}
"""Text that grows; nobody maps it."""


class MappingBar(Bar):
    """Maps every finished file that exists when a step is shown, and keeps what it read."""

    output: Path
    maps: dict[Path, tuple[mmap.mmap, bytes]]

    def update(self, done: int, detail: str) -> None:
        super().update(done, detail)
        for path in self.output.glob("checkpoints/step-*/*"):
            if path not in self.maps and path.stat().st_size:
                with path.open("rb") as file:
                    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self.maps[path] = view, bytes(view)


class MappingScreen(Screen):
    def __init__(self, output: Path) -> None:
        super().__init__(quiet=True)
        self._output = output
        self.maps: dict[Path, tuple[mmap.mmap, bytes]] = {}

    def progress(self, what: str, total: int, done: int = 0) -> Bar:
        bar = MappingBar(self.console, what, total, done)
        bar.output, bar.maps = self._output, self.maps
        return bar


def test_checkpoints_that_were_mapped_read_the_same_after_they_are_retired(
    tmp_path: Path, store: Path
) -> None:
    screen = MappingScreen(tmp_path / "run")
    train_here(settings(tmp_path / "run", data__path=store), screen)
    gone = [path for path in screen.maps if not path.exists()]
    assert any(f"step-{EVERY:06d}" in str(path) for path in gone), "retention has deleted mapped files"
    for path, (view, before) in screen.maps.items():
        assert bytes(view) == before, path


def test_a_second_run_of_the_same_command_replaces_files_and_changes_none(
    tmp_path: Path, store: Path
) -> None:
    output, flags = tmp_path / "run", settings(tmp_path / "run", data__path=store, optim__steps=EVERY)
    train_here(flags)
    held = {
        path: (path.open("rb"), path.read_bytes())
        for path in output.rglob("*")
        if path.is_file() and path.name not in APPENDED
    }
    train_here(flags)
    for path, (file, before) in held.items():
        with file:
            assert file.read() == before, path
