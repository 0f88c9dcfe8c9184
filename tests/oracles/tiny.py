"""Small random drafters and rows that the drafter tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.drafter.attention import Attend, sdpa_attend
from draftline.drafter.blocks import block_positions
from draftline.drafter.mask import block_mask_dense
from draftline.drafter.model import Drafter

FULL = ("full_attention",) * 3
MIXED = ("sliding_attention", "full_attention", "sliding_attention")


def tiny_spec(**changes: object) -> DrafterSpec:
    """Three layers, 4/2 heads, blocks of 4, two taps; any field can be changed."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "layer_types": FULL,
    }
    return DrafterSpec(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def random_drafter(spec: DrafterSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Drafter:
    """A drafter with large random weights, norms included, so that every path moves the output."""
    drafter = Drafter(spec).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return drafter.eval()


@dataclass(frozen=True)
class TinyRow:
    """A packed row: S context tokens of several documents, A blocks of B tokens."""

    lengths: tuple[int, ...]
    positions: Tensor  # int64 [S]
    document_ids: Tensor  # int32 [S]
    anchors: Tensor  # int64 [A]
    anchor_valid: Tensor  # bool [A]
    taps: Tensor  # [S, K*D]
    block_embeds: Tensor  # [A*B, D]

    def start_of(self, anchor: int) -> int:
        """Row offset of the first token of the anchor's document."""
        return anchor - int(self.positions[anchor])


def packed_row(
    spec: DrafterSpec, lengths: tuple[int, ...], anchors: list[int], num_padding: int = 0, seed: int = 1
) -> TinyRow:
    """Documents of `lengths` tokens one after another, padding, and two blocks that are not valid."""
    generator = torch.Generator().manual_seed(seed)
    document_ids = [document for document, length in enumerate(lengths) for _ in range(length)]
    positions = [offset for length in lengths for offset in range(length)]
    num_tokens, num_blocks = len(positions) + num_padding, len(anchors) + 2

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64).normal_(generator=generator)

    return TinyRow(
        lengths=lengths,
        positions=torch.tensor(positions + list(range(num_padding))),
        document_ids=torch.tensor(document_ids + [-1] * num_padding, dtype=torch.int32),
        anchors=torch.tensor([*anchors, 0, 0]),
        anchor_valid=torch.tensor([True] * len(anchors) + [False, False]),
        taps=draw(num_tokens, spec.num_taps * spec.hidden_size),
        block_embeds=draw(num_blocks * spec.block_size, spec.hidden_size),
    )


def row_masks(spec: DrafterSpec, row: TinyRow) -> list[Tensor]:
    """The dense mask of every layer."""
    return [
        block_mask_dense(
            row.anchors,
            row.anchor_valid,
            row.document_ids,
            row.positions,
            block_size=spec.block_size,
            window=spec.window_of(layer),
            causal=spec.causal_in_block(layer),
        )
        for layer in range(spec.num_layers)
    ]


def row_hidden(drafter: Drafter, row: TinyRow, attend: Attend | None = None) -> Tensor:
    """The trainer's forward of a whole row: hidden states [A, B, D]."""
    positions = block_positions(row.positions, row.anchors, drafter.spec.block_size)
    hidden = drafter(
        row.block_embeds,
        row.taps,
        row.positions,
        positions.flatten(),
        attend or sdpa_attend(row_masks(drafter.spec, row)),
    )
    return hidden.unflatten(0, (len(row.anchors), drafter.spec.block_size))
