"""`metrics.jsonl` of a run that was killed and resumed holds every step once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.metrics import MetricsLog, Progress, Rate
from draftline.resilience.folder import METRICS


def remove(path: Path) -> None:
    path.unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_name("kept.jsonl"))


def replace(path: Path) -> None:
    path.unlink()
    path.write_text("somebody's notes\n")


def log_steps(folder: Path, first: int, last: int, resumed: int = 0) -> MetricsLog:
    log = MetricsLog(folder, resumed, say=print)
    for step in range(first, last + 1):
        log.write(Progress(step=step), {"train/loss": float(step)})
    log.close()
    return log


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["progress/step"] for line in (folder / METRICS).read_text().splitlines()]


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_anew(tmp_path: Path):
    log_steps(tmp_path, 1, 7)
    log_steps(tmp_path, 5, 9, resumed=4)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_run_killed_before_its_first_checkpoint_starts_a_new_file(tmp_path: Path):
    log_steps(tmp_path, 1, 3)
    log_steps(tmp_path, 1, 2)
    assert steps_in(tmp_path) == [1, 2]


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path):
    log_steps(tmp_path, 1, 3)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"progress/step": 4, "train/lo')
    log_steps(tmp_path, 4, 4, resumed=3)
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def move_away_and_scribble(path: Path) -> None:
    move_away(path)
    with path.with_name("kept.jsonl").open("ab") as file:
        file.write(b"not UTF-8: \xff\n5\n{}\n")


@pytest.mark.parametrize("happens", [remove, move_away, replace, move_away_and_scribble])
def test_lines_are_written_again_where_somebody_took_the_file_away(
    tmp_path: Path, happens: Callable[[Path], None]
):
    said = list[str]()
    log_steps(tmp_path, 1, 2)
    log = MetricsLog(tmp_path, 2, say=said.append)
    log.write(Progress(step=3), {"train/loss": 3.0})
    assert not said
    happens(tmp_path / METRICS)
    for step in (4, 5):
        log.write(Progress(step=step), {"train/loss": float(step)})
    log.close()
    MetricsLog(tmp_path, 5, say=print).close()  # a resumed run leaves out what is no line
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    (words,) = said
    assert str(tmp_path / METRICS) in words
    assert "written again" in words


def test_it_knows_which_steps_have_been_evaluated(tmp_path: Path):
    log = MetricsLog(tmp_path, say=print)
    log.write(Progress(step=4), {"eval/step": 4, "eval/tau": 2.0})
    log.write(Progress(step=9), {"eval/step": 8, "eval/tau": 2.1})
    log.close()
    assert MetricsLog(tmp_path, 8, say=print).evaluated == {4}


def test_a_file_that_was_cut_is_told_once_and_goes_on(tmp_path: Path):
    said = list[str]()
    log = MetricsLog(tmp_path, say=said.append)
    for step in (1, 2):
        log.write(Progress(step=step), {"train/loss": 1.0})
    size = (tmp_path / METRICS).stat().st_size
    (tmp_path / METRICS).write_bytes(b"")
    for step in (3, 4):
        log.write(Progress(step=step), {"train/loss": 1.0})
    log.close()
    assert steps_in(tmp_path) == [3, 4]
    (words,) = said
    assert f"was cut under the run: {size} bytes of its lines are lost" in words


def test_a_folder_in_the_files_place_is_told_once_and_costs_no_line_when_it_goes(tmp_path: Path):
    said = list[str]()
    log = MetricsLog(tmp_path, say=said.append)
    log.write(Progress(step=1), {"train/loss": 1.0})
    remove(tmp_path / METRICS)
    (tmp_path / METRICS).mkdir()
    for step in (2, 3):
        log.write(Progress(step=step), {"train/loss": 1.0})
    (tmp_path / METRICS).rmdir()
    log.write(Progress(step=4), {"train/loss": 1.0})
    log.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert ["is a folder now" in words for words in said] == [True, False]
    assert "written again" in said[1]


def test_a_rate_counts_from_the_end_of_the_first_step_of_its_own_process():
    rate = Rate()
    assert rate.after_step(90_000, 60.0) is None  # start-up, and the tokens of the process before a resume
    assert rate.after_step(91_000, 62.0) == 500.0
    assert rate.after_step(94_000, 64.0) == 1000.0
