"""The GGUF reader: exact on good files, a CheckpointError and little memory on every damaged one."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.errors import CheckpointError
from draftline.smollm2.gguf import read_gguf
from tests.gguf_files import gguf_bytes

BLOCK = 32


def every_kind() -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """One tensor of each kind that is read."""
    rng = np.random.default_rng(0)
    scale = np.array([0.5], "<f2").tobytes()
    quants = rng.integers(0, 256, 16, np.uint8).tobytes()
    return {
        "f16": ((4,), 1, rng.normal(size=4).astype("<f2").tobytes()),
        "q4_0": ((1, BLOCK), 2, scale + quants),
        "q4_1": ((1, BLOCK), 3, scale + np.array([-1.0], "<f2").tobytes() + quants),
        "q8_0": ((1, BLOCK), 8, scale + rng.integers(-128, 128, BLOCK, np.int8).tobytes()),
        # Last, because it needs no padding: then every shorter file lacks something.
        "f32": ((2, 4), 0, rng.normal(size=8).astype("<f4").tobytes()),
    }


METADATA = {"general.architecture": "llama", "tokens": ["a", "bc"], "types": [1, 3], "eps": 0.5, "flag": True}
GOOD = gguf_bytes(METADATA, every_kind())


def read_bytes(folder: Path, raw: bytes) -> dict[str, np.ndarray]:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    file = read_gguf(path)
    return {name: file.tensor(name) for name in file.tensors}


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    metadata = read_gguf(path).metadata
    assert metadata.keys() == METADATA.keys()
    assert metadata["types"].tolist() == [1, 3]
    assert all(metadata[key] == METADATA[key] for key in METADATA if key != "types")


def test_plain_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    tensors, stored = read_bytes(tmp_path, GOOD), every_kind()
    assert tensors["f32"].shape == (2, 4)
    assert tensors["f32"].tobytes() == stored["f32"][2]
    assert tensors["f16"].astype("<f2").tobytes() == stored["f16"][2]


def test_four_bit_blocks_hold_their_first_half_in_the_low_bits(tmp_path: Path) -> None:
    tensors, stored = read_bytes(tmp_path, GOOD), every_kind()
    quants = list(stored["q4_0"][2][2:])
    expected = [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]
    assert tensors["q4_0"][0].tolist() == [0.5 * (quant - 8) for quant in expected]
    assert tensors["q4_1"][0].tolist() == [0.5 * quant - 1.0 for quant in expected]


def test_eight_bit_blocks_are_signed(tmp_path: Path) -> None:
    tensors, stored = read_bytes(tmp_path, GOOD), every_kind()
    assert tensors["q8_0"][0].tolist() == [
        0.5 * quant for quant in np.frombuffer(stored["q8_0"][2][2:], np.int8)
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(GOOD) - 1))
def test_a_truncated_file_is_refused_with_the_byte(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match=r"byte \d+: .*; get the file again"):
        read_bytes(tmp_path, GOOD[:length])


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_never_crash_or_fill_the_memory(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(GOOD)
    for byte, bit in flips:
        raw[byte] ^= 1 << bit
    tracemalloc.start()
    try:
        read_bytes(tmp_path, bytes(raw))
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200))
def test_any_other_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_bytes(tmp_path, raw)


def test_a_count_larger_than_the_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="metadata pairs do not fit"):
        read_bytes(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(100))


def test_an_unknown_kind_of_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="tensor 'w' is of ggml kind 12; only F32, F16, Q4_0, Q4_1, Q8_0"
    ):
        read_bytes(tmp_path, gguf_bytes({}, {"w": ((256,), 12, bytes(144))}))


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    with pytest.raises(CheckpointError, match="holds no tensor 'blk'"):
        read_gguf(path).tensor("blk")
