"""What a compiled drafter keeps between its passes: nothing that elementwise work can make again.

The compiler never computes a concatenation again, nor anything that follows from one; so one written into the
elementwise part of the model costs the memory of its result, in silence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import scaled_dot_product_attention

from draftline.drafter.model import Drafter
from draftline.drafter.step import embed_blocks
from draftline.pipeline.build import RECOMPUTE
from tests.oracles.tiny import tiny_spec

BLOCKS, BLOCK, CONTEXT, LAYERS = 12, 8, 40, 3
HEADS, HEAD_DIM, HIDDEN, MLP = 4, 8, 24, 56
QUERIES = BLOCKS * BLOCK


def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]


@pytest.fixture(scope="module")
def kept() -> Counter[int]:
    """How many tensors of each number of elements forward keeps for backward, its inputs aside."""
    spec = tiny_spec(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        num_layers=LAYERS,
        layer_types=("full_attention",) * LAYERS,
        block_size=BLOCK,
    )
    drafter = Drafter(spec).bfloat16()
    drafter.init_weights(0)
    token_rows, taps = torch.randn(BLOCKS + 1, HIDDEN), torch.randn(CONTEXT, spec.num_taps * HIDDEN)
    rotaries = drafter.rotary(torch.arange(CONTEXT)), drafter.rotary(torch.arange(QUERIES))
    sizes: Counter[int] = Counter()

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(graph, inputs, **options)
        results: Any = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        for node in results[1:]:
            if node.op != "placeholder" and isinstance(node.meta.get("val"), Tensor):
                sizes[math.prod(node.meta["val"].shape)] += 1
        return forward, backward

    def as_traced(graph: Callable[..., Any], _inputs: Any) -> Callable[..., Any]:
        return graph

    backend = aot_autograd(fw_compiler=as_traced, bw_compiler=as_traced, partition_fn=partition)

    @torch.compile(backend=backend)
    def hidden() -> Tensor:
        blocks = embed_blocks(token_rows, spec, torch.bfloat16)
        return drafter.from_tables(blocks, taps.bfloat16(), *rotaries, attend)

    with functorch_config.patch({**RECOMPUTE, "enable_autograd_cache": False}):
        hidden().sum().backward()
    assert drafter.fc.weight.grad is not None
    return sizes


def test_gate_and_up_are_kept_and_their_product_is_not(kept: Counter[int]):
    assert kept[QUERIES * MLP] == 2 * LAYERS


def test_queries_are_kept_once_before_they_are_normed_and_rotated(kept: Counter[int]):
    # beside them attention's result, as it is and, with a CPU's attention, in the order of the next map too; the last
    # layer's rotated queries are used at once
    assert kept[QUERIES * HEADS * HEAD_DIM] <= 3 * LAYERS + 1


def test_the_embeddings_of_the_blocks_are_not_kept(kept: Counter[int]):
    # what is kept of this size is the residual stream after attention and after the MLP of each layer
    assert kept[QUERIES * HIDDEN] == 2 * LAYERS
