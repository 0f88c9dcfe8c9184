"""A disk that loses power: a real folder, and a record of what of it would survive.

A file's content is durable after `sync_file`, a folder's entries after `sync_folder`; before that a power cut
may keep or lose each of them independently, as file systems do. `PowerCutDisk` performs every call for real
and stops before its k-th one; `survivors` then builds every folder that the next start might find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from draftline.checkpoint.files import CheckpointFileSystem


class PowerCut(BaseException):
    """The machine went down. Not an Exception: nothing may catch it and carry on."""


@dataclass(eq=False)
class File:
    content: bytes
    durable: bytes


@dataclass(eq=False)
class Folder:
    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = File | Folder

# Which unsynced thing survives? Called once for each content and each entry that is not durable.
Survives = Callable[[str], bool]

OUTCOMES: dict[str, Survives] = {
    "everything (kill -9: the kernel still writes it)": lambda _: True,
    "nothing": lambda _: False,
    "names without content (the classic empty file)": lambda kind: kind == "entry",
    "names and half of the content": lambda kind: kind in ("entry", "half"),
    "content without names": lambda kind: kind == "content",
}
_TOSSES = 12


def chance(seed: int) -> Survives:
    """Every unsynced thing survives or not by the toss of a coin."""
    coin = random.Random(seed)
    return lambda _: coin.random() < 0.5


def scan(path: Path) -> Node:
    """A tree as it is on the disk, all of it durable."""
    if path.is_file():
        content = path.read_bytes()
        return File(content, content)
    entries = {child.name: scan(child) for child in path.iterdir()}
    return Folder(entries, dict(entries))


class PowerCutDisk(CheckpointFileSystem):
    """The real file system under `root` until call number `stop_at` (from 0), which raises PowerCut.

    A `sync` that is call number `skip` does nothing, which is how each of them is shown to be needed.
    """

    def __init__(self, root: Path, stop_at: int | None = None, skip: int | None = None) -> None:
        self.root, self.stop_at, self.skip = root, stop_at, skip
        self.calls: list[str] = []
        tree = scan(root)
        assert isinstance(tree, Folder)
        self.tree = tree

    def _call(self, name: str, path: Path) -> None:
        if len(self.calls) == self.stop_at:
            raise PowerCut(f"before call {self.stop_at}: {name} {path.name}")
        self.calls.append(f"{name} {path.relative_to(self.root)}")

    def _node(self, path: Path) -> Node:
        node: Node = self.tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.entries[part]
        return node

    def _parent(self, path: Path) -> Folder:
        node = self._node(path.parent)
        assert isinstance(node, Folder)
        return node

    def make_folder(self, path: Path) -> None:
        self._call("make_folder", path)
        super().make_folder(path)
        self._parent(path).entries[path.name] = Folder()

    def write_bytes(self, path: Path, data: bytes) -> None:
        self._call("write_bytes", path)
        super().write_bytes(path, data)
        self._written(path)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._call("write_tensors", path)
        super().write_tensors(path, tensors)
        self._written(path)

    def _written(self, path: Path) -> None:
        self._parent(path).entries[path.name] = File(path.read_bytes(), b"")

    def sync_file(self, path: Path) -> None:
        self._call("sync_file", path)
        super().sync_file(path)
        node = self._node(path)
        assert isinstance(node, File)
        if not self._skipped():
            node.durable = node.content

    def sync_folder(self, path: Path) -> None:
        self._call("sync_folder", path)
        super().sync_folder(path)
        node = self._node(path)
        assert isinstance(node, Folder)
        if not self._skipped():
            node.durable = dict(node.entries)

    def _skipped(self) -> bool:
        return len(self.calls) - 1 == self.skip

    def rename(self, source: Path, destination: Path) -> None:
        self._call("rename", source)
        super().rename(source, destination)
        self._parent(destination).entries[destination.name] = self._parent(source).entries.pop(source.name)

    def remove_file(self, path: Path) -> None:
        self._call("remove_file", path)
        super().remove_file(path)
        del self._parent(path).entries[path.name]

    def remove_folder(self, path: Path) -> None:
        self._call("remove_folder", path)
        super().remove_folder(path)
        del self._parent(path).entries[path.name]

    def survivors(self, folder: Path) -> Iterator[Path]:
        """Build, one after the other in `folder`, every tree that the next start may find."""
        tosses = [chance(1000 * len(self.calls) + seed) for seed in range(_TOSSES)]
        for number, survives in enumerate([*OUTCOMES.values(), *tosses]):
            _build(self.tree, folder / f"survivor-{number}", survives)
            yield folder / f"survivor-{number}"


def _build(node: Node, path: Path, survives: Survives) -> None:
    if isinstance(node, File):
        path.write_bytes(_content_after(node, survives))
        return
    path.mkdir()
    for name in sorted(node.entries.keys() | node.durable.keys()):
        now, before = node.entries.get(name), node.durable.get(name)
        chosen = now if now is before or survives("entry") else before
        if chosen is not None:
            _build(chosen, path / name, survives)


def _content_after(file: File, survives: Survives) -> bytes:
    """All of it, the first half, or what was durable before."""
    if file.durable == file.content or survives("content"):
        return file.content
    return file.content[: len(file.content) // 2] if survives("half") else file.durable
