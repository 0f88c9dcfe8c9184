"""Two backends, one result; and rows that see nothing stay zero in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftline.config import TILE
from draftline.data.tables import block_tables
from draftline.drafter.attention import flex_attend, kernel_options, sdpa_attend
from draftline.drafter.mask import mask_mod
from tests.oracles.tiny import FULL, packed_row, random_drafter, row_hidden, row_masks, tiny_spec

LAYOUTS = {
    "full": {},
    "sliding, causal": {"layer_types": ("sliding_attention",) * 3, "sliding_window": 40},
    "sliding, both ways": {
        "layer_types": ("sliding_attention",) * 3,
        "sliding_window": 40,
        "is_causal": False,
    },
}


def heads(num_heads: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_heads, length, 16, generator=generator)


def tiled_row(spec):
    """128 context tokens and 32 blocks of 4, so that both sides are whole tiles."""
    anchors = sorted({0, 3, 17, 39, 40, 41, 77, 90, 91, 95, 101, 111, *range(50, 68)})
    return packed_row(spec, (40, 51, 29), anchors, num_padding=8)


def flex_of(spec, row):
    """The flex backend over tables written by the row builder."""
    anchors = row.anchors.numpy()
    starts = anchors - row.positions.numpy()[anchors]
    rules = [
        {"block_size": spec.block_size, "window": spec.window_of(i), "causal": spec.causal_in_block(i)}
        for i in range(spec.num_layers)
    ]
    tables = [
        block_tables(anchors, row.anchor_valid.numpy(), starts, token_budget=len(row.positions), **rule)
        for rule in rules
    ]
    inputs = (row.anchors, row.anchor_valid, row.document_ids, row.positions)
    return flex_attend(tables, [mask_mod(*inputs, **rule) for rule in rules])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_block_sparse_attention_equals_dense_attention(layout):
    spec = tiny_spec(**layout)
    row = tiled_row(spec)
    assert len(row.anchors) == 32
    q, k, v = heads(4, 128, 0), heads(2, 256, 1), heads(2, 256, 2)

    sparse = flex_of(spec, row)(0, q, k, v)
    dense = sdpa_attend(row_masks(spec, row))(0, q, k, v)

    assert (sparse - dense).abs().max() < 1e-5


def test_the_whole_drafter_gives_the_same_with_both_backends():
    spec = tiny_spec(layer_types=("sliding_attention", "full_attention", "full_attention"), sliding_window=40)
    drafter = random_drafter(spec, dtype=torch.float64)
    row = tiled_row(spec)

    with torch.no_grad():
        sparse, dense = row_hidden(drafter, row, flex_of(spec, row)), row_hidden(drafter, row)

    assert (sparse - dense).abs().max() < 1e-6


def gradients(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the summed output for q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(sdpa_attend([mask])(0, *leaves).sum(), leaves)


def test_a_query_that_sees_nothing_gives_zero_and_moves_no_gradient():
    q, k, v = heads(4, 3, 0), heads(2, 5, 1), heads(2, 5, 2)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    living = [0, 2]

    out = sdpa_attend([mask])(0, q, k, v)
    with_dead_row, without = gradients(mask, q, k, v), gradients(mask[living], q[:, living], k, v)

    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert torch.equal(with_dead_row[0][:, 1], torch.zeros_like(out[:, 1]))
    assert torch.allclose(with_dead_row[0][:, living], without[0], atol=1e-6)
    assert torch.allclose(with_dead_row[1], without[1], atol=1e-6)
    assert torch.allclose(with_dead_row[2], without[2], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_nan_when_most_blocks_are_empty(dtype):
    drafter = random_drafter(tiny_spec(layer_types=FULL), dtype=dtype)
    row = packed_row(drafter.spec, (20,), [3])
    row = replace(row, taps=row.taps.to(dtype), block_embeds=row.block_embeds.to(dtype))

    row_hidden(drafter, row).float().pow(2).sum().backward()

    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_gets_tiles_that_divide_those_of_the_tables(head_dim: int):
    options = kernel_options(head_dim, (9, 0))
    tiles = {name: size for name, size in options.items() if "BLOCK" in name}
    assert len(tiles) == 6
    assert all(TILE % size == 0 for size in tiles.values())
    assert options["bwd_USE_TMA"]


def test_other_devices_and_other_head_sizes_keep_inductors_own_choice():
    assert kernel_options(128, None) == kernel_options(128, (8, 0)) == kernel_options(128, (10, 0)) == {}
    assert kernel_options(96, (9, 0)) == kernel_options(256, (9, 0)) == {}, "nothing was measured"
