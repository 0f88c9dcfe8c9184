"""A token store that is not what was written is named before training, and the run that used it can go on after.

There is no setting to train on what is left of it: that would be another run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.errors import DataError
from tests.faults.real_runs import EVERY, assert_same_state, result_of, settings, train_here


def shard(store: Path) -> Path:
    return next(store.glob("*.arrow"))


def flip(store: Path) -> None:
    data = bytearray(shard(store).read_bytes())
    data[len(data) // 2] ^= 4
    shard(store).write_bytes(data)


def cut(store: Path) -> None:
    shard(store).write_bytes(shard(store).read_bytes()[:-100])


def remove(store: Path) -> None:
    shard(store).unlink()


def replace_by_another(store: Path) -> None:
    shard(store).write_bytes(bytes(shard(store).stat().st_size))


def cut_manifest(store: Path) -> None:
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize("damage", [flip, cut, remove, replace_by_another, cut_manifest])
def test_damage_is_named_with_exit_code_4_and_a_sound_copy_goes_on(
    tmp_path: Path, store: Path, unbroken: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(store, tmp_path / "store")
    output = tmp_path / "run"
    shutil.copytree(unbroken / "checkpoints", output / "checkpoints")
    damage(tmp_path / "store")
    with pytest.raises(DataError) as caught:
        train_here(settings(output, data__path=tmp_path / "store"))
    assert str(tmp_path / "store") in str(caught.value)
    assert result_of(output)["exit_code"] == 4
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(store, tmp_path / "store")
    train_here(settings(output, data__path=tmp_path / "store"))
    assert_same_state(output, unbroken)


def test_another_store_does_not_resume_the_run(tmp_path: Path, store: Path) -> None:
    output = tmp_path / "run"
    train_here(settings(output, data__path=store, optim__steps=EVERY))
    with pytest.raises(Exception, match=r"data\.key was"):
        train_here(settings(output, data__max_length=100, optim__steps=EVERY))
