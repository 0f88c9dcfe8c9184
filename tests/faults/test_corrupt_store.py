"""A token store that is not what was written is named before training, and the run that used it can go on after.

`data.on_corrupt=skip` trains on what is left of it. That is another run: neither resumes the other.
"""

from __future__ import annotations

import errno
import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.config import TargetConfig
from draftline.console import Screen
from draftline.data.commands import inspect_store
from draftline.data.fingerprint import hash_file
from draftline.data.prepare import prepare
from draftline.data.store import open_store
from draftline.errors import ConfigError, DataError
from draftline.paths import builtin_conversations
from draftline.pipeline.planning import planned_store
from draftline.settings import parse_run
from draftline.target.load import load_tokenizer
from tests.faults.real_runs import EVERY, STEPS, assert_same_state, result_of, settings, train_here


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


@pytest.mark.parametrize("damage", [flip, cut, remove, cut_manifest])
def test_a_store_that_the_run_made_itself_is_made_again_aloud_and_ends_in_the_same_state(
    tmp_path: Path, unbroken: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(shutil.copytree(unbroken, tmp_path / "run"))
    shutil.rmtree(output / "checkpoints" / f"step-{STEPS:06d}")
    damage(output / "store")
    train_here(settings(output), Screen())
    assert "the run's own store is made again" in " ".join(capsys.readouterr().err.split())
    assert_same_state(output, unbroken)


def test_a_damaged_store_that_the_run_made_stays_while_its_source_is_not_there(tmp_path: Path) -> None:
    source, output = tmp_path / "chats.jsonl.gz", tmp_path / "run"
    shutil.copy(builtin_conversations("builtin:demo"), source)
    flags = settings(output, data__path=source, optim__steps=EVERY)
    train_here(flags)
    flip(output / "store")
    left = sorted((path.name, path.read_bytes()) for path in (output / "store").iterdir())
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"chats\.jsonl\.gz is neither a file"):
        train_here(flags)
    assert sorted((path.name, path.read_bytes()) for path in (output / "store").iterdir()) == left


def test_another_store_does_not_resume_the_run(tmp_path: Path, store: Path) -> None:
    output = tmp_path / "run"
    train_here(settings(output, data__path=store, optim__steps=EVERY))
    with pytest.raises(Exception, match=r"data\.key was"):
        train_here(settings(output, data__max_length=100, optim__steps=EVERY))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three shards, of which the first two are of one size: the same documents in another order."""
    folder = tmp_path_factory.mktemp("sharded")
    with gzip.open(builtin_conversations("builtin:demo"), "rt", encoding="utf-8") as file:
        rows = [next(file) for _ in range(120)]
    (folder / "chats").mkdir()
    for number, part in enumerate((rows[:40], rows[39::-1], rows[40:])):
        (folder / "chats" / f"{number}.jsonl").write_text("".join(part), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftline.data.store.SHARD_TOKENS", 1)
        prepare(folder / "chats", load_tokenizer(TargetConfig(path="builtin:tiny")), folder / "store")
    return folder / "store"


@pytest.fixture
def damaged(sharded: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(sharded, tmp_path / "store"))


def name_of(shard: int) -> str:
    return f"shard-{shard:05d}.arrow"


def flip_in(store: Path, shard: int) -> None:
    path = store / name_of(shard)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def swap(store: Path, one: int, other: int) -> None:
    aside = (store / name_of(one)).rename(store / "aside")
    (store / name_of(other)).rename(store / name_of(one))
    aside.rename(store / name_of(other))


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2)], ids=["of one size", "of two sizes"])
def test_two_swapped_shards_are_found_and_each_is_told_for_the_other(
    damaged: Path, one: int, other: int
) -> None:
    sizes = [(damaged / name_of(shard)).stat().st_size for shard in (one, other)]
    assert (sizes[0] == sizes[1]) == (other == 1)
    swap(damaged, one, other)
    with pytest.raises(DataError) as caught:
        open_store(damaged)
    for place, found in ((one, other), (other, one)):
        assert f"{damaged / name_of(place)} is corrupt: it is {name_of(found)} under another name" in str(
            caught.value
        )
    assert "it held documents 0 to 39 (40)" in str(caught.value)


def test_all_damaged_shards_are_named_at_once_with_their_documents(damaged: Path) -> None:
    flip_in(damaged, 0)
    (damaged / name_of(2)).unlink()
    with pytest.raises(
        DataError, match=r"(?s)00000.arrow is corrupt.*00002.arrow is missing; it held documents 80 to 159"
    ):
        open_store(damaged)


def test_a_shard_that_the_disk_does_not_give_back_is_named_like_a_corrupt_one(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if path.name == name_of(1):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hash_file(path)

    monkeypatch.setattr("draftline.data.integrity.hash_file", read)
    with pytest.raises(
        DataError, match=r"00001\.arrow cannot be read \(.*Input/output error.*documents 40 to 79"
    ):
        open_store(damaged)
    assert len(open_store(damaged, on_corrupt="skip")) == 120


def test_skipping_leaves_out_the_documents_of_a_damaged_shard_and_no_others(
    sharded: Path, damaged: Path
) -> None:
    flip_in(damaged, 1)
    whole, left = open_store(sharded), open_store(damaged, on_corrupt="skip")
    kept = [*range(40), *range(80, 160)]
    assert left.lengths.tolist() == whole.lengths[kept].tolist()
    assert left.keys().tolist() == whole.keys()[kept].tolist()
    assert [(one.first, one.documents) for one in left.damages] == [(40, 40)]


def test_a_store_without_an_intact_shard_is_never_skipped_over(damaged: Path) -> None:
    for shard in range(3):
        flip_in(damaged, shard)
    with pytest.raises(DataError, match="no shard is intact"):
        open_store(damaged, on_corrupt="skip")


def test_a_run_that_skips_says_and_counts_it_and_resumes_to_the_bit(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    flip_in(damaged, 0)
    skip = {"data__path": damaged, "data__on_corrupt": "skip"}
    with pytest.raises(DataError, match=r"data\.on_corrupt=skip starts a run on what is left"):
        train_here(settings(tmp_path / "whole", data__path=damaged))
    train_here(settings(tmp_path / "whole", **skip), Screen())
    said = " ".join(capsys.readouterr().err.split())
    assert f"SHARD LEFT OUT (data.on_corrupt=skip): {damaged / name_of(0)}" in said
    result = result_of(tmp_path / "whole")
    assert (result["exit_code"], result["skipped_documents"]) == (0, 40)

    train_here(settings(tmp_path / "broken", **skip))
    for folder in (tmp_path / "broken" / "checkpoints").glob(f"step-{STEPS:06d}"):
        shutil.rmtree(folder)
    train_here(settings(tmp_path / "broken", **skip))
    assert_same_state(tmp_path / "broken", tmp_path / "whole")


def test_a_run_that_skips_goes_on_only_while_the_same_shards_are_left_out(
    sharded: Path, damaged: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    flip_in(damaged, 0)
    skip = {"data__path": damaged, "data__on_corrupt": "skip", "optim__steps": EVERY}
    train_here(settings(output, **skip))
    shutil.copy(sharded / name_of(0), damaged / name_of(0))
    with pytest.raises(ConfigError, match=r"data\.left_out was \['shard-00000\.arrow'\] and is now"):
        train_here(settings(output, **skip))
    flip_in(damaged, 1)  # of the same number of documents and tokens
    with pytest.raises(
        ConfigError, match=r"data\.left_out was \['shard-00000\.arrow'\] and is now \['shard-00001"
    ):
        train_here(settings(output, **skip))


def test_a_plan_counts_what_a_run_that_skips_would_train_on(damaged: Path, tmp_path: Path) -> None:
    (damaged / name_of(0)).unlink()
    skip = {"data__path": damaged, "data__on_corrupt": "skip"}
    assert len(planned_store(parse_run(settings(tmp_path, **skip)), vocab_size=8).lengths) == 120
    with pytest.raises(DataError, match=r"00000\.arrow is missing"):
        planned_store(parse_run(settings(tmp_path, data__path=damaged)), vocab_size=8)


def test_inspect_numbers_the_documents_of_a_damaged_store_as_a_run_on_it_does(damaged: Path) -> None:
    flip_in(damaged, 0)
    shown = inspect_store(damaged, load_tokenizer(TargetConfig(path="builtin:tiny")), None, document=0)
    assert shown["store_documents"] == 120
    assert "documents 0 to 39 (40)" in shown["left_out"][0]
