"""A row on a device: fixed addresses, one copy per row.

A captured step reads its inputs by address, so the row's tensors live in one buffer that every new row
overwrites.
"""

from __future__ import annotations

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
ROW_TENSORS = ("input_ids", "positions", "document_ids", "anchors", "anchor_valid", "labels", "weights")


def row_tensors(row: Row) -> dict[str, Tensor]:
    """Everything of a row that a drafter's step reads, by name; tables as `INDEX.field`."""
    named: dict[str, Tensor] = {name: row.__dict__[name] for name in ROW_TENSORS}
    for index, tables in enumerate(row.tables):
        named.update({f"{index}.{field.name}": tables.__dict__[field.name] for field in fields(BlockTables)})
    return named


class DeviceRow:
    """One row's tensors on a device, at addresses that never change."""

    def __init__(self, example: Row, device: torch.device) -> None:
        """Lay out a buffer for rows shaped like `example`."""
        self._bounds: dict[str, tuple[int, int]] = {}
        total = 0
        for name, tensor in row_tensors(example).items():
            size = tensor.numel() * tensor.element_size()
            self._bounds[name] = (total, total + size)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        on_cuda = device.type == "cuda"
        self._stages = [torch.zeros(total, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(NUM_STAGES)]
        self._sent: list[DeviceEvent | None] = [None] * NUM_STAGES
        self._turn = 0
        views = self._views(self._buffer, example)
        self.input_ids, self.positions, self.document_ids = (
            views["input_ids"],  # int64 [T]
            views["positions"],  # int64 [T]
            views["document_ids"],  # int32 [T]
        )
        self.anchors, self.anchor_valid = views["anchors"], views["anchor_valid"]  # int64 [A], bool [A]
        self.labels, self.weights = views["labels"], views["weights"]  # int64 [A, B], float32 [A, B]
        self.tables = tuple(
            BlockTables(**{field.name: views[f"{index}.{field.name}"] for field in fields(BlockTables)})
            for index in range(len(example.tables))
        )
        self.load(example)

    def _views(self, buffer: Tensor, like: Row) -> dict[str, Tensor]:
        return {
            name: buffer[slice(*self._bounds[name])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in row_tensors(like).items()
        }

    def load(self, row: Row) -> None:
        """Overwrite with another row, on the current stream."""
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # two rows ago; long done
        stage = self._stages[self._turn]
        for name, view in self._views(stage, row).items():
            view.copy_(row_tensors(row)[name])
        self._buffer.copy_(stage, non_blocking=True)
        if self._buffer.is_cuda:
            self._sent[self._turn] = torch.cuda.current_stream(self._buffer.device).record_event()
        self._turn = (self._turn + 1) % NUM_STAGES
