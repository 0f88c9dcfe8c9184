"""The target's forward over one row, up to the last tap, into a preallocated buffer.

Beside the taps it looks up the embedding rows that the row's blocks are made of. There are two forms, both exact.
*Packed*: the whole row at once through document-isolated attention, for targets whose layers all attend. *Batched*:
documents as lines of a right-padded batch without a mask, which causality makes exact for every architecture,
recurrent layers included. Which one runs is decided at start by a self-test on the user's own target and shown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline.data.rows import Row
from draftline.data.transfer import StagedBuffer
from draftline.drafter.blocks import opening_tokens
from draftline.errors import ConfigError
from draftline.target.attention import ATTENTION_NAME, Packing, attach, choose_kernel
from draftline.target.load import text_config
from draftline.target.states import BlockTokens, TargetStates

Form = Literal["packed", "batched"]
MIN_BUCKET = 32


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A structural copy whose parameters and buffers are the same tensors; its hooks and config are its own."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that holds the decoder layers, the attribute's name, and the layers.

    Raises:
        ConfigError: no list of as many layers as the configuration says.
    """
    expected = text_config(model.config).num_hidden_layers
    for module in model.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == expected:
                return module, name, child
    raise ConfigError(f"{type(model).__name__} has no list of {expected} decoder layers that could be tapped")


class TappedForward:
    """One worker's target: writes the taps of a row to `out` [tokens, K * D], and all of its `states`.

    Not thread safe; each worker builds its own on shared weights (`share_weights`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target_layer_ids: tuple[int, ...],
        token_budget: int,
        max_documents: int,
        form: Form,
        *,
        blocks: BlockTokens | None = None,
        flash: bool = False,
    ) -> None:
        """Allocate what rows need.

        Args:
            blocks: of the rows, where a drafter will read their embedding rows; None where only taps are wanted.
            flash: attend by FlashAttention 4 where the form is packed and the type half precision.
        """
        self.form = form
        self.body, self.layers = _truncate(share_weights(model), max(target_layer_ids) + 1)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        self.device, hidden = weight.device, weight.shape[1]
        self._embedding, self._blocks = weight.detach(), blocks
        num_blocks = blocks and blocks.num_blocks
        self.states = TargetStates.zeros(token_budget, len(target_layer_ids), num_blocks, hidden, weight)
        self.out = self.states.taps
        num_openings = len(self.states.token_rows)
        self._inputs = StagedBuffer(_empty_inputs(token_budget, max_documents, num_openings), self.device)
        tensors = self._inputs.tensors
        self.input_ids, self.positions = tensors["input_ids"][None], tensors["positions"][None]  # [1, tokens]
        self.packing = Packing(
            cu_seqlens=tensors["cu_seqlens"],
            document_ids=tensors["document_ids"],
            max_document=token_budget,
            kernel=choose_kernel(self.device, weight.dtype, flash=flash),
        )
        self._row: Row | None = None
        self._targets: list[Tensor] = []  # batched form: rows of `out` that the running call fills
        for order, layer in enumerate(target_layer_ids):
            self.layers[layer].register_forward_hook(self._tap(order, hidden))
        if form == "packed":
            self.body.config._attn_implementation = ATTENTION_NAME  # pyright: ignore[reportPrivateUsage]
            attach(self.body, self.packing)

    def _tap(self, order: int, hidden: int) -> Callable[..., None]:
        columns = slice(order * hidden, (order + 1) * hidden)

        def tap(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # must return None: a value would replace the layer's output
            states = output[0] if isinstance(output, tuple) else output  # [lines, tokens, hidden]
            if self.form == "packed":
                self.out[:, columns].copy_(states[0])
                return
            for line, rows in enumerate(self._targets):
                rows[:, columns].copy_(states[line, : rows.shape[0]])

        return tap

    def compile_layers(self, compile_function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compile the layers' forward; layers of one class share one compilation."""
        compiled = {kind: compile_function(kind.forward) for kind in {type(layer) for layer in self.layers}}
        for layer in self.layers:
            layer.forward = MethodType(compiled[type(layer)], layer)

    def load(self, row: Row) -> None:
        """Bring a row to the device, at fixed addresses."""
        self._row = row
        self._inputs.load(
            {
                "input_ids": row.input_ids,
                "positions": row.positions,
                "document_ids": row.document_ids,
                "cu_seqlens": _padded_bounds(row, self.packing),
                "openings": self._openings(row),
            }
        )

    def _openings(self, row: Row) -> Tensor:
        if self._blocks is None:
            return row.input_ids[:0]
        return opening_tokens(row.input_ids, row.anchors, row.anchor_valid, self._blocks.mask_token_id)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Compute the loaded row's `states`; returns its taps, `out` [tokens, K * D]. Padding tokens hold finite
        values."""
        if self._blocks is not None:
            self.states.token_rows.copy_(F.embedding(self._inputs.tensors["openings"], self._embedding))
        if self.form == "packed":
            self.packing.masks.clear()  # here and not in `load`, so that a captured run makes them anew
            self.body(input_ids=self.input_ids, position_ids=self.positions, use_cache=False)
        else:
            self._run_batched()
        return self.out

    def _run_batched(self) -> None:
        assert self._row is not None
        self.out.zero_()
        for documents in _buckets(self._row.starts):
            length = _bucket_length(max(stop - start for start, stop in documents))
            ids = torch.zeros(len(documents), length, dtype=torch.int64, device=self.device)
            for line, (start, stop) in enumerate(documents):
                ids[line, : stop - start] = self.input_ids[0, start:stop]
            self._targets = [self.out[start:stop] for start, stop in documents]
            self.body(input_ids=ids, use_cache=False)


def _truncate(model: PreTrainedModel, num_layers: int) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The body without anything after the last tapped layer; the final norm and the head never run."""
    holder, name, layers = decoder_layers(model)
    kept = layers[:num_layers]
    assert isinstance(kept, nn.ModuleList)
    setattr(holder, name, kept)
    body = model.get_decoder()
    text = text_config(body.config)
    text.num_hidden_layers = num_layers
    return body, kept


def _empty_inputs(token_budget: int, max_documents: int, num_openings: int) -> dict[str, Tensor]:
    """What a row brings to the device, before any row has come."""
    return {
        "input_ids": torch.zeros(token_budget, dtype=torch.int64),
        "positions": torch.zeros(token_budget, dtype=torch.int64),
        "document_ids": torch.zeros(token_budget, dtype=torch.int32),
        "cu_seqlens": torch.full((max_documents + 2,), token_budget, dtype=torch.int32),
        "openings": torch.zeros(num_openings, dtype=torch.int64),
    }


def _padded_bounds(row: Row, packing: Packing) -> Tensor:
    """Document starts, then the row's end over and over: zero-length documents keep the shape fixed."""
    bounds = torch.full(packing.cu_seqlens.shape, row.input_ids.shape[0], dtype=torch.int32)
    starts = torch.tensor(row.starts, dtype=torch.int32)
    if len(starts) >= len(bounds):
        raise ConfigError(
            f"row {row.index} holds {len(starts) - 1} documents, more than the {len(bounds) - 2} that fit its tables"
        )
    bounds[: len(starts)] = starts
    return bounds


def _bucket_length(length: int) -> int:
    """The next power of two from MIN_BUCKET on, so that shapes stay few."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def _buckets(starts: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Documents of a row grouped by padded length, each as (first token, end)."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(starts):
        groups.setdefault(_bucket_length(stop - start), []).append((start, stop))
    return [groups[length] for length in sorted(groups)]
