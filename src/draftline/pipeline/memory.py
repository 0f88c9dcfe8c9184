"""Device memory of each side, added up before anything is allocated.

Counted are the tensors that live at the peak of a step; the CUDA context and the allocator's slack come on top
(`HEADROOM`). Legend as in costs.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from draftline.pipeline.costs import DrafterCost, TargetCost
from draftline.target.states import num_states
from draftline.target.worker import NUM_STAGES

HEADROOM = 0.07
"""Share of a device's memory left to the context, graphs and fragmentation."""
FLOAT32 = 4
LOSS_BYTES = 2 + 4 + 4
"""Of one logit: as computed, in float32, and its slope."""


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    def __add__(self, other: Memory) -> Memory:
        names = {**self.parts, **other.parts}
        return Memory({name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in names})


@dataclass(frozen=True)
class Sizes:
    """What decides how much memory a worker needs, beside the model's shapes."""

    target_bytes: int
    """Of one of the target's weights, and of a tap."""
    drafter_bytes: int
    """Of one of the drafter's compute weights."""
    same_type: bool
    """Whether both have one type, so that the drafter reads the target's own head."""
    float8: bool
    """Whether its linear maps multiply copies in float8."""
    flash: bool
    """Whether its attention is FlashAttention 4."""
    channel_slots: int
    chunk_rows: int
    rows_per_step: int


def device_memory(
    targets: Sequence[Hashable],
    drafters: Sequence[Hashable],
    target: TargetCost,
    drafter: DrafterCost,
    sizes: Sizes,
    *,
    split: bool,
) -> dict[Hashable, Memory]:
    """Memory of each device; a device may be named several times, and workers there share what is read only.

    Args:
        targets, drafters: device of each worker. In a colocated run both lists are the same.
    """
    used: dict[Hashable, Memory] = {device: Memory({}) for device in (*targets, *drafters)}
    for device in used:
        if device in targets:
            used[device] += Memory({"target weights": target.num_weights * sizes.target_bytes})
        else:
            used[device] += Memory({"target's head": target.head_weights * sizes.target_bytes})
    for device in targets:
        used[device] += target_worker(target, drafter, sizes, split=split)
    for device in drafters:
        used[device] += drafter_worker(drafter, sizes, len(drafters), split=split)
    return used


def target_worker(cost: TargetCost, drafter: DrafterCost, sizes: Sizes, *, split: bool) -> Memory:
    """One target worker, without the weights."""
    states = _states(drafter, sizes)
    # of one layer, which frees its values before the next begins
    return Memory(
        {
            "target activations": drafter.tokens
            * (cost.widest + 3 * drafter.spec.hidden_size)
            * sizes.target_bytes,
            "target states": states * (1 + (NUM_STAGES if split else 0)),
        }
    )


def drafter_worker(drafter: DrafterCost, sizes: Sizes, num_drafters: int, *, split: bool) -> Memory:
    """One drafter worker, without the target's head."""
    weights, spec = drafter.num_weights, drafter.spec
    queries = drafter.blocks * spec.block_size
    keys = drafter.tokens + queries
    saved = spec.num_layers * (
        queries * (2 * spec.hidden_size + 2 * drafter.query_width + 2 * spec.intermediate_size)
        + keys * 2 * drafter.key_width
    )
    shard = -(-weights // num_drafters)
    sum_bytes = FLOAT32 if sizes.rows_per_step > num_drafters else sizes.drafter_bytes
    activations = saved * sizes.drafter_bytes
    loss = (
        sizes.chunk_rows * spec.vocab_size * LOSS_BYTES + 2 * queries * spec.hidden_size * sizes.drafter_bytes
    )
    return Memory(
        {
            "drafter weights": weights * sizes.drafter_bytes,
            # the weights are a part of their masters: half of each in bfloat16, all of it in float32
            "masters and moments": (3 * FLOAT32 - sizes.drafter_bytes) * shard,
            "gradients": sum_bytes * weights + (FLOAT32 * shard if num_drafters > 1 else 0),
            "drafter activations": activations,
            "loss": loss,
            # of one map, which frees its copies before the next begins
            "float8 copies": drafter.largest_operands if sizes.float8 else 0,
            "attention sums": _attention_sums(drafter, queries, keys) if sizes.flash else 0,
            # a row's gradients take the place of the activations that backward has used
            "row gradients": max(0, weights * sizes.drafter_bytes - activations - loss),
            "target states": _states(drafter, sizes) * (1 + sizes.channel_slots) if split else 0,
            "head in the drafter's type": 0
            if sizes.same_type
            else spec.vocab_size * spec.hidden_size * sizes.drafter_bytes,
        }
    )


def _attention_sums(drafter: DrafterCost, queries: int, keys: int) -> int:
    """Gradients of one layer's queries before they are converted, and of keys and values that several heads share."""
    shared = drafter.key_width < drafter.query_width
    return FLOAT32 * (queries * drafter.query_width + shared * 2 * keys * drafter.key_width)


def _states(drafter: DrafterCost, sizes: Sizes) -> int:
    spec = drafter.spec
    vectors = num_states(drafter.tokens, spec.num_taps, drafter.blocks)
    return vectors * spec.hidden_size * sizes.target_bytes
