"""A checkpoint that somebody made to do harm: names, links, pipes and pickles."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.checkpoint import read_checkpoint
from draftline.checkpoint.manifest import MANIFEST, decode_manifest
from draftline.errors import CheckpointError
from draftline.resilience.names import UnsafeNameError, plain_name, read_regular
from draftline.resilience.sealed import DamagedError, seal, unseal
from tests.faults.snapshots import assert_is_step, resume, save_steps

HARMFUL = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    ".hidden",
    "~",
    "-rf",
    "a\0b",
    "a\nb",
    "C:x",
    "x" * 200,
    "caf\u00e9",
    "model.safetensors ",
    "\u202egpj",
]


def with_file_named(root: Path, name: str) -> bytes:
    """A sealed manifest that lists one of its files under another name."""
    body = unseal((root / "step-000010" / MANIFEST).read_bytes(), MANIFEST)
    body["files"][name] = body["files"].pop("config.json")
    return seal(body)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_steps(root := tmp_path_factory.mktemp("untrusted") / "checkpoints", 10)
    return root


@pytest.mark.parametrize("name", HARMFUL)
def test_a_manifest_with_a_harmful_name_is_damaged(root: Path, name: str) -> None:
    with pytest.raises(DamagedError, match="not a plain name"):
        decode_manifest(with_file_named(root, name))


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=40)
    | st.lists(st.sampled_from(["..", ".", "/", "a", "\\", "\0"]), max_size=6).map("".join)
)
def test_a_name_is_refused_or_stays_one_component_of_its_folder(name: str) -> None:
    try:
        plain_name(name)
    except UnsafeNameError:
        return
    folder = Path("/checkpoints/step-000010")
    assert (folder / name).parent == folder
    assert os.path.normpath(folder / name) == str(folder / name)
    assert name.isprintable()
    assert name.isascii()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["format", "step", "row", "files", "meta", "x"]), json_values))
def test_any_sealed_json_is_a_manifest_or_a_named_refusal(changes: dict[str, Any]) -> None:
    body = {
        "format": 1, "step": 1, "row": 8, "world": {}, "meta": {}, "files": {},
        "config": {}, "config_sha256": "", "data": {}, "data_sha256": "",
    }  # fmt: skip
    try:
        manifest = decode_manifest(seal(body | changes))
    except (DamagedError, CheckpointError):
        return
    assert manifest.step >= 0
    assert manifest.row >= 0


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_never_a_manifest(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_manifest(data)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    save_steps(root := tmp_path / "checkpoints", 10, 20)
    config = root / "step-000020" / "config.json"
    config.rename(tmp_path / "elsewhere.json")
    config.symlink_to(tmp_path / "elsewhere.json")
    loaded = resume(root)
    assert_is_step(loaded, 10)
    assert loaded is not None
    assert "config.json is a link" in loaded.notes[0]
    assert (tmp_path / "elsewhere.json").exists()


def test_a_checkpoint_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    save_steps(root := tmp_path / "checkpoints", 10, 20)
    (root / "step-000020").rename(tmp_path / "elsewhere")
    (root / "step-000020").symlink_to(tmp_path / "elsewhere")
    assert_is_step(resume(root), 10)
    assert (tmp_path / "elsewhere" / MANIFEST).exists()


def test_clearing_leftovers_removes_links_and_not_what_they_point_to(tmp_path: Path) -> None:
    save_steps(root := tmp_path / "checkpoints", 10)
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("kept")
    (root / ".tmp-1-20").symlink_to(precious)
    (root / ".trash-step-000005").mkdir()
    (root / ".trash-step-000005" / "link").symlink_to(precious)
    assert_is_step(resume(root), 10)
    assert (precious / "file").read_text() == "kept"
    assert [path.name for path in root.iterdir()] == ["step-000010"]


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UnsafeNameError, match="not a regular file"):
        read_regular(tmp_path, "config.json", 100)


def test_a_device_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UnsafeNameError, match="not a regular file"):
        read_regular(Path("/dev"), "zero", 100)


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    (folder := tmp_path / "step-000010").mkdir()
    with (folder / MANIFEST).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="more than"):
        read_checkpoint(folder)


class Harm:
    """Unpickling this writes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


RUNS_CODE = {
    "pickle.find_class",
    "marshal.loads",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
}


class Watch:
    """Audit events that run code, while `on`; one for the module, since an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self.on and event in RUNS_CODE:
            self.seen.append(event)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_pickles_in_every_place_of_a_checkpoint_are_never_loaded(tmp_path: Path, watch: Watch) -> None:
    save_steps(root := tmp_path / "checkpoints", 10, 20)
    evil = pickle.dumps(Harm(canary := tmp_path / "canary"))
    for name in ("optimizer.pt", "pytorch_model.bin", ".metadata", "model.pkl"):
        (root / "step-000010" / name).write_bytes(evil)
        (root / name).write_bytes(evil)
    (root / "step-000020" / "model.safetensors").write_bytes(evil)
    shutil.copytree(root / "step-000010", root / "step-000030")
    (root / "step-000030" / MANIFEST).write_bytes(evil)
    (root / "best.json").write_bytes(evil)
    watch.on = True
    loaded = resume(root)
    watch.on = False
    assert_is_step(loaded, 10)
    assert watch.seen == []
    assert not canary.exists()


def test_the_watch_would_have_seen_a_pickle(tmp_path: Path, watch: Watch) -> None:
    watch.on = True
    pickle.loads(pickle.dumps(Harm(canary := tmp_path / "canary")))
    watch.on = False
    assert watch.seen == ["pickle.find_class", "os.system"]
    assert canary.exists()
