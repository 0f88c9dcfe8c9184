"""The drafter's forward against z-lab's own package: what trains is what z-lab's code computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftline.drafter.model import Drafter, rotate
from draftline.errors import ConfigError
from tests.oracles.tiny import FULL, MIXED, TinyRow, packed_row, random_drafter, row_hidden, tiny_spec
from tests.oracles.zlab import zlab_block, zlab_drafter

LAYOUTS = {
    "full": {"layer_types": FULL},
    "sliding, causal as served by default": {"layer_types": MIXED, "sliding_window": 6},
    "sliding, both ways": {"layer_types": MIXED, "sliding_window": 6, "is_causal": False},
    "full, causal": {"layer_types": FULL, "is_causal": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_block_of_a_packed_row_equals_zlab_alone_with_that_prefix(layout):
    drafter = random_drafter(tiny_spec(**layout))
    row = packed_row(drafter.spec, (17, 9, 14), [1, 7, 16, 17, 20, 26, 33, 39], num_padding=3)

    hidden = row_hidden(drafter, row)[row.anchor_valid]
    expected = zlab_hidden(zlab_drafter(drafter), row, drafter.spec.block_size)

    assert (hidden - expected).abs().max() < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_gradient_of_every_weight_equals_that_of_autograd_through_zlabs_code(layout):
    drafter = random_drafter(tiny_spec(**layout))
    row = packed_row(drafter.spec, (17, 9, 14), [1, 7, 16, 17, 20, 26, 33, 39], num_padding=3)
    oracle = zlab_drafter(drafter)
    slope = torch.randn(8, drafter.spec.block_size, drafter.spec.hidden_size, dtype=torch.float64)

    (row_hidden(drafter, row)[row.anchor_valid] * slope).sum().backward()
    (zlab_hidden(oracle, row, drafter.spec.block_size) * slope).sum().backward()

    theirs = dict(oracle.named_parameters())
    for name, weight in drafter.named_parameters():
        expected = theirs[name].grad
        assert weight.grad is not None
        assert expected is not None
        assert (weight.grad - expected).abs().max() < 1e-5 * expected.abs().max(), name


def zlab_hidden(oracle: torch.nn.Module, row: TinyRow, block_size: int) -> Tensor:
    """z-lab's hidden states [blocks, B, D] of a row's valid blocks, each after its own document's prefix alone."""
    embeds = row.block_embeds.unflatten(0, (-1, block_size))
    return torch.stack(
        [
            zlab_block(oracle, embeds[block], row.taps[row.start_of(anchor) : anchor])
            for block, anchor in enumerate(row.anchors[row.anchor_valid].tolist())
        ]
    )


def test_a_rotation_turns_and_its_gradient_turns_back():
    rotary = Drafter(tiny_spec()).rotary(torch.tensor([0, 3, 700]))
    x = torch.randn(2, 3, tiny_spec().head_dim, dtype=torch.float64, requires_grad=True)

    (back,) = torch.autograd.grad(rotate(x, rotary), x, rotate(x, rotary))

    # a rotation keeps lengths, so that its transpose is its inverse; the tables are float32
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)
    assert torch.equal(rotate(x, rotary)[:, 0], x[:, 0])
    assert (rotate(x, rotary)[:, 1:] - x[:, 1:]).abs().max() > 0.1
    assert torch.autograd.gradcheck(lambda y: rotate(y, rotary), x)


def test_the_state_dict_has_exactly_the_published_names_and_shapes():
    spec = tiny_spec()
    d, f, hd = spec.hidden_size, spec.intermediate_size, spec.head_dim
    layer = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (spec.num_heads * hd, d),
        "self_attn.k_proj.weight": (spec.num_kv_heads * hd, d),
        "self_attn.v_proj.weight": (spec.num_kv_heads * hd, d),
        "self_attn.o_proj.weight": (d, spec.num_heads * hd),
        "self_attn.q_norm.weight": (hd,),
        "self_attn.k_norm.weight": (hd,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    expected = {"fc.weight": (d, spec.num_taps * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}

    assert {name: tuple(t.shape) for name, t in Drafter(spec).state_dict().items()} == expected


def test_initial_weights_depend_on_the_seed_alone():
    first, second, other = Drafter(tiny_spec()), Drafter(tiny_spec()), Drafter(tiny_spec())
    first.init_weights(3)
    second.init_weights(3)
    other.init_weights(4)

    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value))
        else:
            assert not torch.equal(value, other.state_dict()[name])
            assert 0.018 < value.std() < 0.022


def test_every_norm_learns():
    """A norm that starts at 1 and stays there is cut off from the loss."""
    drafter = Drafter(tiny_spec())
    drafter.init_weights(0)
    row = packed_row(drafter.spec, (30,), [3, 11, 24])
    row = replace(row, taps=row.taps.float(), block_embeds=row.block_embeds.float())
    wanted = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, weight_decay=0.0)

    for _ in range(20):
        optimizer.zero_grad()
        (row_hidden(drafter, row) - wanted)[row.anchor_valid].square().mean().backward()
        optimizer.step()

    norms = {name: weight for name, weight in drafter.named_parameters() if weight.dim() == 1}
    assert len(norms) == 2 + 4 * drafter.spec.num_layers
    assert [name for name, weight in norms.items() if (weight == 1.0).any()] == []


def test_rotary_angles_do_not_lose_precision_in_a_bfloat16_drafter():
    positions = torch.tensor([0, 1, 4095, 200_000])
    exact = Drafter(tiny_spec()).rotary(positions)
    coarse = Drafter(tiny_spec()).to(torch.bfloat16).rotary(positions)

    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(exact, coarse, strict=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_layers": 2}, "layer_types names 3 layers but num_layers is 2"),
        ({"layer_types": MIXED, "sliding_window": 3}, "sliding_window=3 is shorter than block_size=4"),
        ({"layer_types": MIXED}, "sliding_window=None is shorter than block_size=4"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Drafter(tiny_spec(**changes))
