"""One drafter's work on one row: forward, loss, backward. No decision, no allocation by data.

The step reads its row and the target's states at fixed addresses, so that on CUDA the whole of it is one graph. What
is compiled is given by the caller; on a CPU nothing is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from draftline.compiling.graphs import Step
from draftline.config import DrafterSpec
from draftline.data.transfer import DeviceRow
from draftline.drafter.attention import Attend, flex_attend, kernel_options
from draftline.drafter.blocks import block_positions, lay_out_blocks
from draftline.drafter.flash import Bounds, context_bounds, flash_attend
from draftline.drafter.flash_proof import prove_flash
from draftline.drafter.loss import cross_entropy_chunk, frozen_head_loss
from draftline.drafter.mask import MaskMod, mask_mod
from draftline.drafter.model import Drafter, Rotary
from draftline.drafter.stats import row_stats, stats_size
from draftline.drafter.tiled import query_tiles, tiled_attend
from draftline.optim import FlatParameters
from draftline.target.states import TargetStates

Backend = Literal["flex", "flash", "sdpa"]
"""flex and flash read tables of tiles; sdpa is dense."""
Compile = Callable[[Callable[..., object]], Callable[..., object]]
Window = tuple[int | None, bool]


def layer_windows(spec: DrafterSpec) -> tuple[Window, ...]:
    """(sliding window, causal inside the block) of each layer."""
    return tuple((spec.window_of(layer), spec.causal_in_block(layer)) for layer in range(spec.num_layers))


def distinct_windows(spec: DrafterSpec) -> tuple[Window, ...]:
    """Each kind of layer once, in order of appearance; the order of a row's tables."""
    return tuple(dict.fromkeys(layer_windows(spec)))


def embed_blocks(token_rows: Tensor, spec: DrafterSpec, dtype: torch.dtype) -> Tensor:
    """The target's raw embedding rows of every block token, scaled, [A * B, D]; of `TargetStates.token_rows`."""
    return lay_out_blocks(token_rows, spec.block_size).flatten(0, 1).to(dtype) * spec.input_embedding_scale


class AccumulatingStep:
    """A row's forward and backward, then its gradients into the step's sums.

    The first row of a step writes them, so that nothing has to be zeroed; later rows add.
    """

    def __init__(
        self,
        row: Step[tuple[Tensor, ...]],
        write: Callable[[tuple[Tensor, ...]], object],
        add: Callable[[tuple[Tensor, ...]], object],
    ) -> None:
        self._row, self._write, self._add = row, write, add

    def replay(self, *, first: bool) -> None:
        """Learn from the loaded row; `first` of an optimizer step."""
        gradients = self._row.replay()
        (self._write if first else self._add)(gradients)


class DrafterStep:
    """Forward and backward of one row, on one device, in one thread."""

    def __init__(
        self,
        drafter: Drafter,
        parameters: FlatParameters,
        head: Tensor,  # [V, D]
        row: DeviceRow,
        states: TargetStates,
        backend: Backend,
        chunk_rows: int,
        compile_function: Compile | None = None,
    ) -> None:
        self.drafter, self.parameters, self.row, self.states = drafter, parameters, row, states
        self.spec = drafter.spec
        self.backend: Backend = backend
        self.head = head
        self.chunk_rows = chunk_rows
        self.dtype = parameters.weights.dtype
        device = head.device
        capability = torch.cuda.get_device_capability(device) if head.is_cuda else None
        self._kernel_options = kernel_options(self.spec.head_dim, capability)
        self.stats = torch.zeros(stats_size(self.spec.block_size), device=device)
        self._rotaries: Callable[[], tuple[Rotary, Rotary]] = self.rotaries
        self._hidden: Callable[..., Tensor] = self.hidden
        self._chunk: Callable[..., tuple[Tensor, Tensor, Tensor]] = cross_entropy_chunk
        if compile_function is not None:
            # apart, so that the tables exist: one graph would compute every cosine again for each head of each layer
            self._rotaries = compile_function(self.rotaries)  # pyright: ignore[reportAttributeAccessIssue]
            self._hidden = compile_function(self.hidden)  # pyright: ignore[reportAttributeAccessIssue]
            self._chunk = compile_function(cross_entropy_chunk)  # pyright: ignore[reportAttributeAccessIssue]

    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Of the loaded row's positions and of its blocks', as `hidden` takes them."""
        row = self.row
        blocks = block_positions(row.positions, row.anchors, self.spec.block_size)
        return self.drafter.rotary(row.positions), self.drafter.rotary(blocks.flatten())

    def hidden(self, context_rotary: Rotary, block_rotary: Rotary) -> Tensor:
        """Final hidden states of every block token, [A * B, D]."""
        return self.drafter.from_tables(
            embed_blocks(self.states.token_rows, self.spec, self.dtype),
            self.states.taps.to(self.dtype),
            context_rotary,
            block_rotary,
            self._attend(),
        )

    def _attend(self) -> Attend:
        row, windows = self.row, layer_windows(self.spec)
        kinds = distinct_windows(self.spec)
        kind_of = [kinds.index(window) for window in windows]
        tables = [row.tables[kind] for kind in kind_of] if self.backend != "sdpa" else []
        if self.backend == "flash":
            bounds = [self._bounds(*kind) for kind in kinds]
            return flash_attend(tables, [bounds[kind] for kind in kind_of])
        rules = [self._rule(*kind) for kind in kinds]
        layer_rules = [rules[kind] for kind in kind_of]
        if self.backend == "flex":
            return flex_attend(tables, layer_rules, options=self._kernel_options)
        tiles = query_tiles(row.anchors, row.anchor_valid, row.positions, self.spec.block_size)
        return tiled_attend(tiles, layer_rules, row.positions.shape[0])

    def _rule(self, window: int | None, causal: bool) -> MaskMod:
        row = self.row
        return mask_mod(
            row.anchors,
            row.anchor_valid,
            row.document_ids,
            row.positions,
            block_size=self.spec.block_size,
            window=window,
            causal=causal,
        )

    def _bounds(self, window: int | None, causal: bool) -> Bounds:
        row = self.row
        return context_bounds(
            row.anchors,
            row.anchor_valid,
            row.positions,
            block_size=self.spec.block_size,
            window=window,
            causal=causal,
        )

    def prove_flash(self) -> float | None:
        """How far FlashAttention 4 is from dense attention on the loaded row; see `flash_proof.prove_flash`."""
        kinds = [(self._bounds(*kind), self._rule(*kind)) for kind in distinct_windows(self.spec)]
        return prove_flash(self.spec, self.row, kinds, self.dtype)

    def run(self) -> tuple[Tensor, ...]:
        """Add the loaded row's sums to `stats`; returns its gradients, in the order of `parameters`."""
        hidden = self._hidden(*self._rotaries())
        loss = frozen_head_loss(
            hidden, self.head, self.row.labels, self.row.weights, self.chunk_rows, self._chunk
        )
        edge = get_gradient_edge(hidden)
        del hidden  # backward needs only where it came from
        # a row without any anchor uses no key: those weights have no gradient, which adds up like zero
        gradients = torch.autograd.grad(
            edge, self.parameters.parameters, loss.gradient, materialize_grads=True
        )
        with torch.no_grad():
            self.stats += row_stats(loss, self.row.weights, self.row.anchor_valid)
        return gradients
