"""Drafting: one block at a time, after a context whose keys and values are kept.

Only context keys and values outlive a step: those of a block belong to tokens that may be rejected.

Legend: D = hidden size, K = taps, B = block size, V = vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import block_positions, block_token_ids
from draftline.drafter.mask import block_mask_dense, decoding_mask
from draftline.drafter.model import Drafter


class ContextCache:
    """Keys and values of the context, in every layer, for at most `capacity` tokens."""

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        spec, weight = drafter.spec, drafter.fc.weight
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity, spec.head_dim)
        self._store = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.drafter = drafter
        self.length = 0

    def append(self, taps: Tensor) -> None:
        """Add the taps [n, K*D] of the next n tokens."""
        positions = torch.arange(self.length, self.length + len(taps), device=taps.device)
        context, rotary = self.drafter.fuse(taps), self.drafter.rotary(positions)
        place = slice(self.length, self.length + len(taps))
        for layer, store in zip(self.drafter.decoder_layers(), self._store, strict=True):
            store[0, :, place], store[1, :, place] = layer.context_kv(context, rotary)
        self.length += len(taps)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, length, hd] of one layer."""
        return self._store[index, 0, :, : self.length], self._store[index, 1, :, : self.length]


class BlockDrafter:
    """A drafter with the target's embedding [V, D] and head [V, D], following one sequence."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, capacity: int) -> None:
        self.drafter, self.spec = drafter, drafter.spec
        self.embedding, self.head = embedding, head
        self.cache = ContextCache(drafter, capacity)

    def observe(self, taps: Tensor) -> None:
        """Take in the taps [n, K*D] of tokens that were committed."""
        self.cache.append(taps.to(self.drafter.fc.weight.dtype))

    def logits(self, anchor: int) -> Tensor:
        """Logits [B-1, V] of the drafts after the token `anchor`, which follows everything observed."""
        ids, positions = one_block(anchor, self.cache.length, self.spec, self.embedding.device)
        masks = {window: self._decoding_mask(*window) for window in self._windows()}
        return self._run(ids, positions, [masks[window] for window in self._windows()])[0]

    def logits_at(self, text: Tensor, anchors: Tensor) -> Tensor:
        """Logits [A, B-1, V] of the drafts at many anchors, int64 [A], of a text already observed.

        Each block sees only what precedes its anchor, so this is what `logits` would have given there.
        Anchors are smaller than the number of observed tokens.
        """
        ids = block_token_ids(text, anchors, anchors >= 0, self.spec.mask_token_id, self.spec.block_size)
        positions = torch.arange(self.cache.length, device=anchors.device)
        masks = {
            window: block_mask_dense(
                anchors,
                anchors >= 0,
                torch.zeros_like(positions),
                positions,
                block_size=self.spec.block_size,
                window=window[0],
                causal=window[1],
            )
            for window in self._windows()
        }
        blocks = block_positions(positions, anchors, self.spec.block_size)
        return self._run(ids, blocks, [masks[window] for window in self._windows()])

    def _run(self, ids: Tensor, positions: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
        """Blocks of ids and positions int64 [A, B] through all layers -> logits [A, B-1, V]."""
        x = F.embedding(ids.flatten(), self.embedding).to(self.drafter.fc.weight.dtype)
        x = x * self.spec.input_embedding_scale
        rotary, attend = self.drafter.rotary(positions.flatten()), sdpa_attend(masks)
        for index, layer in enumerate(self.drafter.decoder_layers()):
            x = layer.block(x, self.cache.layer(index), rotary, attend)
        drafts = self.drafter.norm(x).unflatten(0, ids.shape)[
            :, 1:
        ]  # slot 0 is the anchor: it drafts nothing
        return F.linear(drafts.to(self.head.dtype), self.head)

    def _windows(self) -> list[tuple[int | None, bool]]:
        spec = self.spec
        return [(spec.window_of(layer), spec.causal_in_block(layer)) for layer in range(spec.num_layers)]

    def _decoding_mask(self, window: int | None, causal: bool) -> Tensor | None:
        return decoding_mask(
            self.cache.length,
            block_size=self.spec.block_size,
            window=window,
            causal=causal,
            device=self.embedding.device,
        )


def one_block(anchor: int, position: int, spec: DrafterSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [1, B] each, of the block whose anchor token stands at `position`."""
    first = torch.zeros(1, dtype=torch.int64, device=device)
    valid = torch.ones(1, dtype=torch.bool, device=device)
    text, place = torch.tensor([anchor], device=device), torch.tensor([position], device=device)
    ids = block_token_ids(text, first, valid, spec.mask_token_id, spec.block_size)
    return ids, block_positions(place, first, spec.block_size)
