"""Writes small GGUF files for tests."""

from __future__ import annotations

import struct

import numpy as np

ALIGNMENT = 32


def packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def packed_value(value: object) -> bytes:
    """A metadata value with its type in front."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + packed_string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(packed_string, value))
        case [int(), *_]:
            return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()
    raise TypeError(value)


def gguf_bytes(metadata: dict[str, object], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A GGUF file; each tensor is (shape, ggml kind, stored bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(packed_string(key) + packed_value(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, stored) in tensors.items():
        header += packed_string(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, len(data))
        data += stored + bytes(-len(stored) % ALIGNMENT)
    return header + bytes(-len(header) % ALIGNMENT) + data
