"""Whatever happens to the bytes of a checkpoint is found, named and answered by the one before it."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftline.checkpoint import Checkpointer, Identity, read_checkpoint
from draftline.checkpoint.manifest import MANIFEST, decode_manifest
from draftline.errors import CheckpointError, ConfigError
from draftline.resilience.sealed import DamagedError, seal, unseal
from tests.faults.snapshots import IDENTITY, assert_is_step, checkpointer, resume, save_steps, snapshot

FILES = ["model.safetensors", "optimizer.safetensors", "config.json", MANIFEST]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "checkpoints"
    save_steps(root, 10, 20)
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "checkpoints"))


def flip_bit(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def flip_a_random_bit(path: Path) -> None:
    chosen = random.Random(path.name)
    flip_bit(path, chosen.randrange(path.stat().st_size), chosen.randrange(8))


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [flip_a_random_bit, cut_last_byte, append_a_byte, empty, Path.unlink, make_folder_of]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(
    root: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(root / "step-000020" / file)
    loaded = resume(root)
    assert_is_step(loaded, 10)
    assert loaded is not None
    first, second = loaded.notes
    assert "step-000020 is damaged" in first
    assert file in first
    assert second == "resumed from step-000010; the steps after it are trained again"
    assert (root / "quarantine" / "step-000020.1").is_dir()


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(good: Path) -> None:
    data = (good / "step-000020" / MANIFEST).read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DamagedError):
            decode_manifest(bytes(flipped))


def test_a_flipped_bit_in_any_byte_of_a_weights_file_is_found(root: Path) -> None:
    path = root / "step-000020" / "model.safetensors"
    for position in range(path.stat().st_size):
        flip_bit(path, position, position % 8)
        with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its SHA-256"):
            read_checkpoint(path.parent)
        flip_bit(path, position, position % 8)
    assert_is_step(read_checkpoint(path.parent), 20)


def test_a_file_that_was_cut_short_is_named_with_both_sizes(root: Path) -> None:
    path = root / "step-000020" / "model.safetensors"
    size = path.stat().st_size
    cut_last_byte(path)
    with pytest.raises(CheckpointError, match=f"has {size - 1} bytes, the manifest says {size}"):
        read_checkpoint(path.parent)


def test_two_swapped_files_are_found(root: Path) -> None:
    folder = root / "step-000020"
    (folder / "model.safetensors").rename(folder / "aside")
    (folder / "optimizer.safetensors").rename(folder / "model.safetensors")
    (folder / "aside").rename(folder / "optimizer.safetensors")
    loaded = resume(root)
    assert_is_step(loaded, 10)


def test_a_file_swapped_between_two_checkpoints_is_found(root: Path) -> None:
    shutil.copy(root / "step-000010" / "optimizer.safetensors", root / "step-000020")
    assert_is_step(resume(root), 10)


def test_a_whole_checkpoint_under_another_steps_name_is_found(root: Path) -> None:
    shutil.rmtree(root / "step-000020")
    shutil.copytree(root / "step-000010", root / "step-000020")
    loaded = resume(root)
    assert_is_step(loaded, 10)
    assert loaded is not None
    assert "its manifest is of step 10" in loaded.notes[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"a": NaN}\n', b"\xff\xfe"])
def test_a_manifest_that_is_not_one_is_found(root: Path, content: bytes) -> None:
    (root / "step-000020" / MANIFEST).write_bytes(content)
    assert_is_step(resume(root), 10)


@pytest.mark.parametrize(
    "change", [{"row": -1}, {"row": "8"}, {"row": None}, {"unknown": 1}, {"files": {"a": {}}}]
)
def test_a_sealed_manifest_with_impossible_entries_is_found(root: Path, change: dict) -> None:
    path = root / "step-000020" / MANIFEST
    path.write_bytes(seal(unseal(path.read_bytes(), MANIFEST) | change))
    assert_is_step(resume(root), 10)


def test_when_no_checkpoint_is_intact_the_same_command_never_starts_afresh(root: Path) -> None:
    for step in ("step-000010", "step-000020"):
        flip_a_random_bit(root / step / "optimizer.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of the 2 .* is intact.*-000020.*-000010") as caught:
            resume(root)
        assert caught.value.exit_code == 10


def test_the_resumed_run_may_write_the_step_that_was_quarantined(root: Path) -> None:
    for number in (1, 2):
        flip_a_random_bit(root / "step-000020" / "model.safetensors")
        with checkpointer(root) as saver:
            saver.load_latest()
            saver.save(snapshot(20))
        assert (root / "quarantine" / f"step-000020.{number}").is_dir()
    assert_is_step(resume(root), 20)


def test_order_comes_from_steps_and_never_from_the_clock(root: Path) -> None:
    for file in [*root.glob("step-000020"), *root.glob("step-000020/*")]:
        os.utime(file, (0, 0))
    for file in root.glob("step-000010/*"):
        os.utime(file, (2**33, 2**33))
    assert_is_step(resume(root), 20)


def test_a_million_steps_come_after_the_step_before(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_steps(root, 999_999, 1_000_000)
    assert_is_step(resume(root), 1_000_000)


def test_another_runs_checkpoint_is_refused_with_every_differing_key(root: Path) -> None:
    other = Identity(
        config={"optim": {"lr": 3e-4, "steps": 100}, "seed": 3, "drafter": {"num_layers": 5}},
        data={"sha256": "cd" * 32},
    )
    with pytest.raises(ConfigError) as caught:
        Checkpointer(root, other, keep=2, write_timeout_s=20).load_latest()
    message = str(caught.value)
    assert "config.optim.lr was 0.0006 and is now 0.0003" in message
    assert "config.drafter was 'absent' and is now {'num_layers': 5}" in message
    assert "data.sha256" in message
    assert "seed" not in message
    assert_is_step(resume(root), 20)


def test_an_equal_configuration_is_equal_whatever_the_order_of_its_keys(root: Path) -> None:
    config = {"seed": 3, "optim": {"steps": 100, "lr": 6e-4}}
    same = Identity(config=config, data=IDENTITY.data)
    assert_is_step(Checkpointer(root, same, keep=2, write_timeout_s=20).load_latest(), 20)


def test_a_checkpoint_of_a_newer_version_is_left_alone(root: Path) -> None:
    path = root / "step-000020" / MANIFEST
    path.write_bytes(seal(unseal(path.read_bytes(), MANIFEST) | {"format": 2}))
    with pytest.raises(CheckpointError, match="newer than"):
        resume(root)
    assert path.exists()


def test_a_checkpoint_that_may_not_be_read_is_left_alone() -> None:
    with tempfile.TemporaryDirectory() as base, as_an_ordinary_user(Path(base)):
        save_steps(root := Path(base) / "checkpoints", 10, 20)
        manifest = root / "step-000020" / MANIFEST
        manifest.chmod(0)
        with pytest.raises(CheckpointError, match="Permission denied"):
            resume(root)
        manifest.chmod(0o600)
        assert_is_step(resume(root), 20)


@contextmanager
def as_an_ordinary_user(folder: Path) -> Iterator[None]:
    """Root may read everything, so root becomes another user who owns `folder`."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
