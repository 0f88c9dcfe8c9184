"""A row on a device: fixed addresses, one copy per row.

A captured step reads its inputs by address, so they live in one buffer that every new row overwrites. The copy
starts from pinned memory: from pageable memory the host would wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from draftline.data.rows import Row
from draftline.data.tables import BlockTables
from draftline.events import DeviceEvent

ALIGNMENT = 16
"""Bytes; where each tensor starts in the buffer."""
NUM_STAGES = 2
"""Pinned host copies, so that the next row is packed while the last one travels."""
STEP_TENSORS = ("positions", "document_ids", "anchors", "anchor_valid", "labels", "weights")


def row_tensors(row: Row) -> dict[str, Tensor]:
    """Everything of a row that a drafter's step reads, by name; tables as `INDEX.field`. Of the row's tokens it reads
    embedding rows only, which come with the target's states."""
    named: dict[str, Tensor] = {name: row.__dict__[name] for name in STEP_TENSORS}
    for index, tables in enumerate(row.tables):
        named.update({f"{index}.{field.name}": tables.__dict__[field.name] for field in fields(BlockTables)})
    return named


class StagedBuffer:
    """Named tensors in one device buffer, overwritten from the host without waiting for the device."""

    def __init__(self, example: Mapping[str, Tensor], device: torch.device) -> None:
        """Lay out a buffer for tensors shaped like `example`, and load it."""
        self._bounds: dict[str, tuple[int, int]] = {}
        total = 0
        for name, tensor in example.items():
            size = tensor.numel() * tensor.element_size()
            self._bounds[name] = (total, total + size)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        pin = device.type == "cuda"
        stages = [torch.zeros(total, dtype=torch.uint8, pin_memory=pin) for _ in range(NUM_STAGES)]
        self._stages = [self._views(stage, example) for stage in stages]
        self._stage_buffers = stages
        self._sent: list[DeviceEvent | None] = [None] * NUM_STAGES
        self._turn = 0
        self.tensors = self._views(self._buffer, example)
        """Views of the device buffer by name; their addresses never change."""
        self.load(example)

    def _views(self, buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: buffer[slice(*self._bounds[name])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in like.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite all of them, on the current stream."""
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # NUM_STAGES loads ago; long done
        for name, view in self._stages[self._turn].items():
            view.copy_(tensors[name])
        self._buffer.copy_(self._stage_buffers[self._turn], non_blocking=True)
        if self._buffer.is_cuda:
            self._sent[self._turn] = torch.cuda.current_stream(self._buffer.device).record_event()
        self._turn = (self._turn + 1) % NUM_STAGES


class DeviceRow:
    """One row's tensors on a device, at addresses that never change."""

    def __init__(self, example: Row, device: torch.device) -> None:
        """Lay out a buffer for rows shaped like `example`."""
        self._buffer = StagedBuffer(row_tensors(example), device)
        views = self._buffer.tensors
        self.positions, self.document_ids = views["positions"], views["document_ids"]  # int64 [T], int32 [T]
        self.anchors, self.anchor_valid = views["anchors"], views["anchor_valid"]  # int64 [A], bool [A]
        self.labels, self.weights = views["labels"], views["weights"]  # int64 [A, B], float32 [A, B]
        self.tables = tuple(
            BlockTables(**{field.name: views[f"{index}.{field.name}"] for field in fields(BlockTables)})
            for index in range(len(example.tables))
        )

    def load(self, row: Row) -> None:
        """Overwrite with another row, on the current stream."""
        self._buffer.load(row_tensors(row))
