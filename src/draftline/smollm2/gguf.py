"""Reads GGUF files: metadata, and tensors of the kinds F32, F16, Q4_0, Q4_1 and Q8_0 as float32.

Layout (ggml's GGUF specification, versions 2 and 3, little-endian): magic, version, counts, key/value pairs,
tensor descriptions, padding, tensor data. Nothing the file says is believed before it is compared with the
file's length, so a damaged file ends in a CheckpointError and never in a large allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from draftline.errors import CheckpointError

T = TypeVar("T", int, float, str, list[str], np.ndarray)
Value = int | float | bool | str | list[str] | np.ndarray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LEAST_PAIR_BYTES = 13
_LEAST_TENSOR_BYTES = 32
_MAX_DIMS = 4


@dataclass(frozen=True)
class _Kind:
    """A way to store numbers: blocks of `elements` in `num_bytes` each."""

    name: str
    elements: int
    num_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    """uint8 [blocks, num_bytes] -> float32 [blocks, elements]"""


def _halves(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    # The first half of a block sits in the low four bits, the second half in the high ones.
    return np.concatenate([blocks & 15, blocks >> 4], axis=1).astype(np.float32)


def _decode_f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks[:, 2:]) - 8.0) * _halves(blocks[:, :2])


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks[:, 4:]) * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * _halves(blocks[:, :2])


_KINDS = {
    0: _Kind("F32", 1, 4, _decode_f32),
    1: _Kind("F16", 1, 2, _halves),
    2: _Kind("Q4_0", 32, 18, _decode_q4_0),
    3: _Kind("Q4_1", 32, 20, _decode_q4_1),
    8: _Kind("Q8_0", 32, 34, _decode_q8_0),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """Slowest dimension first, as NumPy and PyTorch write it."""
    kind: _Kind
    offset: int
    """Bytes from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.elements * self.kind.num_bytes


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header has been checked against its length; tensors are read when asked for."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data: np.ndarray
    """uint8 [file bytes], memory-mapped."""

    def value(self, key: str, kind: type[T]) -> T:
        """Look up metadata of a known type.

        Raises:
            CheckpointError: the key is missing or holds another type.
        """
        found = self.metadata.get(key)
        if not isinstance(found, kind):
            raise CheckpointError(
                f"{self.path}: metadata '{key}' is {found!r:.80}, not {kind.__name__}; it is another model"
            )
        return found

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor as float32, shaped `tensors[name].shape`.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor '{name}'; it is a file of another model")
        info = self.tensors[name]
        blocks = self.data[info.offset : info.offset + info.num_bytes].reshape(-1, info.kind.num_bytes)
        return info.kind.decode(blocks).reshape(info.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a GGUF file.

    Raises:
        CheckpointError: the file is missing, is not GGUF, is of a kind not read here, or is damaged; the
            message gives the byte.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; give the path of a GGUF file") from None
    cursor = _Cursor(path, data)
    if cursor.take(4, "the magic") != _MAGIC:
        cursor.fail(0, "this is not a GGUF file, which begins with 'GGUF'")
    version = cursor.integer(4, "the version")
    if version not in _VERSIONS:
        cursor.fail(4, f"GGUF version {version} is not read here, only little-endian versions 2 and 3")
    num_tensors = cursor.count(_LEAST_TENSOR_BYTES, "tensors")
    num_pairs = cursor.count(_LEAST_PAIR_BYTES, "metadata pairs")
    metadata = dict(cursor.pair() for _ in range(num_pairs))
    tensors = dict(cursor.tensor_info() for _ in range(num_tensors))
    return GgufFile(path, metadata, _placed(cursor, tensors, metadata), data)


def _placed(
    cursor: _Cursor, tensors: dict[str, TensorInfo], metadata: dict[str, Value]
) -> dict[str, TensorInfo]:
    """Make offsets count from the start of the file, and check that every tensor lies inside it."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(cursor.offset, f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.offset // alignment) * alignment
    placed = {}
    for name, info in tensors.items():
        moved = TensorInfo(info.shape, info.kind, start + info.offset)
        missing = moved.offset + moved.num_bytes - len(cursor.data)
        if missing > 0:
            cursor.fail(moved.offset, f"tensor '{name}' ends {missing} bytes after the end of the file")
        placed[name] = moved
    return placed


class _Cursor:
    """Walks over the header; every read is checked against the bytes that are left."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data.data
        self.offset = 0

    def fail(self, offset: int, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}, byte {offset}: {reason}; get the file again or name another one")

    def take(self, num_bytes: int, what: str) -> memoryview:
        left = len(self.data) - self.offset
        if num_bytes > left:
            self.fail(self.offset, f"{what} needs {num_bytes} bytes and the file has {left} left")
        taken = self.data[self.offset : self.offset + num_bytes]
        self.offset += num_bytes
        return taken

    def integer(self, num_bytes: int, what: str) -> int:
        return int.from_bytes(self.take(num_bytes, what), "little")

    def count(self, least_bytes: int, what: str) -> int:
        """A number of items that cannot be smaller than `least_bytes` each."""
        offset = self.offset
        number = self.integer(8, f"the number of {what}")
        if number * least_bytes > len(self.data) - self.offset:
            self.fail(offset, f"{number} {what} do not fit in the {len(self.data) - self.offset} bytes left")
        return number

    def string(self, what: str) -> str:
        offset = self.offset
        text = bytes(self.take(self.count(1, f"characters of {what}"), what))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(offset, f"{what} is not UTF-8 text")

    def pair(self) -> tuple[str, Value]:
        key = self.string("a metadata key")
        return key, self.value(self.integer(4, f"the type of '{key}'"), key)

    def value(self, code: int, key: str) -> Value:
        if code == _STRING:
            return self.string(f"'{key}'")
        if code == _ARRAY:
            return self.array(key)
        return self.numbers(code, 1, key)[0].item()

    def array(self, key: str) -> Value:
        code = self.integer(4, f"the item type of '{key}'")
        if code == _STRING:
            return [self.string(f"'{key}'") for _ in range(self.count(8, f"strings of '{key}'"))]
        return self.numbers(code, self.count(1, f"items of '{key}'"), key)

    def numbers(self, code: int, count: int, key: str) -> np.ndarray:
        if code not in _SCALARS:
            self.fail(self.offset, f"'{key}' has the unknown value type {code}")
        dtype = np.dtype(_SCALARS[code])
        raw = self.take(count * dtype.itemsize, f"'{key}'")
        # Through uint8, because a byte other than 0 and 1 is not a valid NumPy truth value.
        return np.frombuffer(raw, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(raw, dtype)

    def tensor_info(self) -> tuple[str, TensorInfo]:
        """One tensor description; its offset still counts from the start of the data section."""
        start = self.offset
        name = self.string("a tensor name")
        dims = self.integer(4, f"the dimensions of '{name}'")
        if not 1 <= dims <= _MAX_DIMS:
            self.fail(start, f"tensor '{name}' has {dims} dimensions, not 1 to {_MAX_DIMS}")
        sizes = [self.integer(8, f"the shape of '{name}'") for _ in range(dims)]
        kind = _KINDS.get(code := self.integer(4, f"the kind of '{name}'"))
        if kind is None:
            known = ", ".join(known.name for known in _KINDS.values())
            self.fail(start, f"tensor '{name}' is of ggml kind {code}; only {known} are read")
        if min(sizes) < 1 or sizes[0] % kind.elements:
            self.fail(start, f"tensor '{name}' has the shape {sizes}, which {kind.name} cannot hold")
        offset = self.integer(8, f"the offset of '{name}'")
        return name, TensorInfo(tuple(reversed(sizes)), kind, offset)
