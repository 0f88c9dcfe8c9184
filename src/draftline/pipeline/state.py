"""The state of training as named tensors: independent of how many drafters hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.optim import FlatLayout

KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ShardState:
    """One drafter's shard of the state after a step, on the host."""

    steps_done: int
    index: int
    layout: FlatLayout
    tensors: Mapping[str, Tensor]  # KINDS: float32 [shard]; "step": float32 []


@dataclass(frozen=True)
class TrainingState:
    """Masters and AdamW moments by `KIND.PARAMETER`, float32, and the optimizer's step count `step` []."""

    steps_done: int
    tensors: Mapping[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """The drafter's float32 weights by parameter name."""
        prefix = "master."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def join_shards(shards: list[ShardState]) -> TrainingState:
    """Put the shards of one step together."""
    ordered = sorted(shards, key=lambda shard: shard.index)
    layout = ordered[0].layout
    tensors = {"step": ordered[0].tensors["step"]}
    for kind in KINDS:
        flat = torch.cat([shard.tensors[kind] for shard in ordered])
        tensors.update({f"{kind}.{name}": view.clone() for name, view in layout.views(flat).items()})
    return TrainingState(ordered[0].steps_done, tensors)


def cut_shard(
    tensors: Mapping[str, Tensor], layout: FlatLayout, index: int, num_shards: int
) -> dict[str, Tensor]:
    """The part of a saved state that drafter `index` of `num_shards` owns; inverse of `join_shards`."""
    part = layout.shard(index, num_shards)
    out = {"step": tensors["step"]}
    for kind in KINDS:
        flat = torch.zeros(layout.size)
        for name, view in layout.views(flat).items():
            view.copy_(tensors[f"{kind}.{name}"])
        out[kind] = flat[part]
    return out
