"""Flat parameters and the sharded AdamW against the module and torch.optim.AdamW themselves."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftline import optim
from draftline.config import OptimConfig
from draftline.drafter.model import Drafter
from draftline.optim import (
    ALIGNMENT,
    FlatLayout,
    FlatParameters,
    ShardedAdamW,
    compute_weights,
    join,
    learning_rate,
    split,
)
from draftline.pipeline.state import ShardState, TrainingState, cut_shard, join_shards
from tests.oracles.tiny import tiny_spec

CONFIG = OptimConfig(steps=10, weight_decay=0.1, betas=(0.9, 0.95))
SHARDS = [1, 2, 3, 5]


def drafter(seed: int = 0) -> Drafter:
    module = Drafter(tiny_spec(num_layers=1, layer_types=("full_attention",)))
    module.init_weights(seed)
    return module


@dataclass
class Flat:
    """One module, and the optimizers that own its shards."""

    module: Drafter
    parameters: FlatParameters
    optimizers: list[ShardedAdamW]

    @classmethod
    def of(cls, num_shards: int, dtype: torch.dtype = torch.float32, config: OptimConfig = CONFIG) -> Flat:
        module = drafter()
        parameters = FlatParameters(module, num_shards, dtype)
        optimizers = [ShardedAdamW(parameters, i, num_shards, config) for i in range(num_shards)]
        return cls(module, parameters, optimizers)

    def step(self, gradients: list[Tensor], total_weight: float, lr: float) -> Tensor:
        """One optimizer step as the drafters take it, on summed gradients that are not yet normalised."""
        self.parameters.write(gradients)
        for optimizer in self.optimizers:
            optimizer.lr.fill_(lr)
            if optimizer.gradient.data_ptr() != self.parameters.gradients.data_ptr():
                optimizer.gradient.copy_(self.parameters.gradients[optimizer.slice])
        square_sum = torch.stack([o.square_sum() for o in self.optimizers]).sum()
        for optimizer in self.optimizers:
            optimizer.total_square_sum.copy_(square_sum)
            optimizer.total_weight.fill_(total_weight)
        norms = [optimizer.update() for optimizer in self.optimizers]
        return norms[0]

    def state(self, steps_done: int = 1) -> TrainingState:
        shards = [
            ShardState(
                steps_done, i, self.parameters.layout, {n: t.clone() for n, t in optimizer.state().items()}
            )
            for i, optimizer in enumerate(self.optimizers)
        ]
        return join_shards(shards)


def random_gradients(parameters: list[nn.Parameter], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(p.shape, generator=generator) for p in parameters]


@pytest.mark.parametrize("num_shards", SHARDS)
def test_parameters_are_views_of_one_flat_tensor_in_equal_aligned_shards(num_shards: int):
    module = drafter()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    flat = FlatParameters(module, num_shards, torch.float32)
    layout = flat.layout
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() == flat.weights.untyped_storage().data_ptr()
    assert layout.size % (ALIGNMENT * num_shards) == 0
    assert layout.size - sum(p.numel() for p in module.parameters()) < ALIGNMENT * num_shards
    shards = [layout.shard(i, num_shards) for i in range(num_shards)]
    assert [s.start for s in shards] == [i * layout.size // num_shards for i in range(num_shards)]
    assert shards[-1].stop == layout.size


def test_matrices_come_first_and_norms_last():
    layout = FlatLayout.of(drafter(), 2)
    for shape, offset in zip(layout.shapes, layout.offsets, strict=True):
        assert (offset < layout.num_decayed) == (len(shape) > 1)


def test_writing_the_flat_tensor_writes_the_module():
    flat = Flat.of(1)
    flat.parameters.weights.fill_(7.0)
    assert all((p == 7.0).all() for p in flat.module.parameters())


def test_gradients_add_up_in_float32_whatever_the_compute_type():
    flat = Flat.of(1, torch.bfloat16)
    one = [torch.full(p.shape, 1.0, dtype=torch.bfloat16) for p in flat.parameters.parameters]
    tiny = [torch.full(p.shape, 2.0**-12, dtype=torch.bfloat16) for p in flat.parameters.parameters]
    flat.parameters.write(one)
    for gradients in (tiny, tiny):
        flat.parameters.accumulate(gradients)
    used = flat.parameters.layout.views(flat.parameters.gradients)
    assert all((g == 1 + 2.0**-11).all() for g in used.values())


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("scale", [0.001, 10.0], ids=["below the clip", "clipped"])
def test_several_steps_equal_torch_adamw_with_clipping(num_shards: int, scale: float):
    flat, reference = Flat.of(num_shards), drafter()
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=CONFIG.betas)
    total_weight = 37.0
    for step in range(6):
        lr = 1e-2 / (step + 1)
        gradients = random_gradients(flat.parameters.parameters, step, scale)
        norm = flat.step(gradients, total_weight, lr)
        by_name = dict(zip(flat.parameters.layout.names, gradients, strict=True))
        for name, parameter in reference.named_parameters():
            parameter.grad = by_name[name] / total_weight
        expected = nn.utils.clip_grad_norm_(reference.parameters(), CONFIG.clip_norm)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        torch.testing.assert_close(norm, expected)
    for (name, ours), parameter in zip(flat.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num_shards", SHARDS)
def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(num_shards: int):
    flat = Flat.of(num_shards)
    before = {n: p.detach().clone() for n, p in flat.module.named_parameters()}
    flat.step([torch.zeros_like(p) for p in flat.parameters.parameters], 1.0, lr=0.5)
    for name, parameter in flat.module.named_parameters():
        factor = 1 - 0.5 * CONFIG.weight_decay if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_seen(
    num_shards: int, bad: float, dtype: torch.dtype
):
    flat = Flat.of(num_shards, dtype)
    flat.step(random_gradients(flat.parameters.parameters, 0), 3.0, lr=1e-2)
    before, weights = flat.state().tensors, flat.parameters.weights.clone()

    poisoned = random_gradients(flat.parameters.parameters, 1)
    poisoned[0].view(-1)[0] = bad  # in one shard only: the others must withhold their update too
    norm = flat.step(poisoned, 3.0, lr=1e-2)

    assert not norm.isfinite()
    assert torch.equal(flat.parameters.weights, weights)
    for name, tensor in flat.state().tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("num_shards", SHARDS)
def test_after_a_withheld_step_nothing_changes_until_the_host_has_learned_of_it(num_shards: int):
    flat = Flat.of(num_shards)
    good = random_gradients(flat.parameters.parameters, 0)
    flat.step([g.clone() for g in good], 3.0, lr=1e-2)
    before = flat.state().tensors
    flat.step([torch.full_like(g, float("nan")) for g in good], 3.0, lr=1e-2)
    assert flat.step(good, 3.0, lr=1e-2).isfinite()
    for name, tensor in flat.state().tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_while_a_graph_is_made_change_nothing_and_the_next_step_is_the_usual_one(dtype: torch.dtype):
    warmed, usual = Flat.of(2, dtype), Flat.of(2, dtype)
    first, second = (random_gradients(usual.parameters.parameters, seed) for seed in (0, 1))
    for flat in (warmed, usual):
        flat.step(first, 3.0, lr=1e-2)  # as in a resumed run, whose moments are not zero
    left = warmed.state().tensors
    for optimizer in warmed.optimizers:
        optimizer.gradient.fill_(float("nan"))  # whatever lies there
        with optimizer.withheld():
            optimizer.update()
    for name, tensor in warmed.state().tensors.items():
        assert torch.equal(tensor, left[name]), name
    for flat in (warmed, usual):
        flat.step(second, 3.0, lr=1e-2)
    for name, tensor in warmed.state().tensors.items():
        assert torch.equal(tensor, usual.state().tensors[name]), name


def test_a_step_without_any_weight_has_gradient_norm_zero_and_stays_finite():
    flat = Flat.of(2)
    norm = flat.step([torch.zeros_like(p) for p in flat.parameters.parameters], 0.0, lr=1e-2)
    assert norm == 0
    assert flat.parameters.weights.isfinite().all()


def test_the_result_does_not_depend_on_the_number_of_shards():
    results = []
    for num_shards in SHARDS:
        flat = Flat.of(num_shards)
        for step in range(3):
            flat.step(random_gradients(flat.parameters.parameters, step), 3.0, lr=1e-2)
        results.append({name: p.detach().clone() for name, p in flat.module.named_parameters()})
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(other[name], weight)


def test_bfloat16_weights_follow_float32_masters():
    flat = Flat.of(2, torch.bfloat16)
    for step in range(5):
        flat.step(random_gradients(flat.parameters.parameters, step), 3.0, lr=1e-3)
    masters = torch.cat([o.state()["master"] for o in flat.optimizers])
    assert masters.dtype == torch.float32
    assert torch.equal(flat.parameters.weights, compute_weights(masters, torch.bfloat16))
    assert not torch.equal(flat.parameters.weights.float(), masters)  # or the masters were rounded


def test_with_bfloat16_weights_the_masters_move_as_they_do_without():
    """Nothing of a float32 master is lost by keeping it in two halves: the same updates give the same bits."""
    halves, whole = Flat.of(1, torch.bfloat16), Flat.of(1, torch.float32)
    for step in range(20):
        for flat in (halves, whole):
            flat.step(random_gradients(flat.parameters.parameters, step), 3.0, lr=1e-3)
    masters = [flat.optimizers[0].state()["master"] for flat in (halves, whole)]
    assert torch.equal(*masters)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
@example([0x3F808000, 0x3F818000, -0x40808000 + 2**16, 0x00008000, 0x7F7FFFFF, 0, -(2**31)])
def test_a_master_in_two_halves_is_the_master_to_the_last_bit(patterns: list[int]):
    master = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    master = master[master.isfinite()]
    weights, rest = split(master)
    assert torch.equal(join(weights, rest).view(torch.int32), master.view(torch.int32))
    finite = weights.isfinite()  # the largest float32 rounds to infinity, in bfloat16 by PyTorch too
    error = (weights[finite].double() - master[finite].double()).abs()
    nearest = (master[finite].bfloat16().double() - master[finite].double()).abs()
    assert torch.equal(error[nearest.isfinite()], nearest[nearest.isfinite()])


def test_weights_that_are_bfloat16_already_are_taken_as_they_are():
    narrow = drafter().bfloat16()
    given = {name: weight.clone() for name, weight in narrow.state_dict().items()}
    parameters = FlatParameters(narrow, 1, torch.bfloat16)
    views = parameters.layout.views(parameters.weights)
    assert all(torch.equal(views[name], weight) for name, weight in given.items())


class LargestInt32(TorchDispatchMode):
    """Elements of the largest tensor that was made of a float32's bits."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.int32:
            self.largest = max(self.largest, out.numel())
        return out


def test_masters_are_taken_apart_and_put_together_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """At once they would take several times their own memory, which no plan counts."""
    monkeypatch.setattr(optim, "PIECE", 1000)
    parameters = FlatParameters(drafter(), 2, torch.bfloat16)
    with LargestInt32() as seen:
        optimizer = ShardedAdamW(parameters, 1, 2, CONFIG)
        state = optimizer.state()
        optimizer.load_state(state)
    assert len(optimizer.weights) > 4000
    assert 0 < seen.largest <= 1000
    assert torch.equal(state["master"], parameters.initial_masters(optimizer.slice))
    assert torch.equal(optimizer.state()["master"], state["master"])


def test_the_first_row_of_a_step_replaces_what_the_last_step_left():
    flat = Flat.of(1)
    first, second = (random_gradients(flat.parameters.parameters, seed) for seed in (0, 1))
    for gradients in (first, second):
        flat.parameters.write(gradients)
    views = flat.parameters.layout.views(flat.parameters.gradients).values()
    assert all(torch.equal(view, gradient) for view, gradient in zip(views, second, strict=True))


def test_one_row_a_step_keeps_its_gradients_in_the_type_they_come_in():
    """Half the memory, and the same update: a single row has nothing to add up."""
    wide, narrow = (
        FlatParameters(drafter(), 1, torch.bfloat16, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    states = []
    for parameters in (wide, narrow):
        optimizer = ShardedAdamW(parameters, 0, 1, CONFIG)
        parameters.write([g.bfloat16() for g in random_gradients(parameters.parameters, 0)])
        optimizer.lr.fill_(1e-3)
        optimizer.total_square_sum.copy_(optimizer.square_sum())
        optimizer.total_weight.fill_(2.0)
        optimizer.update()
        states.append(optimizer.state())
    assert narrow.gradients.dtype == torch.bfloat16
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, msg=name)


def test_updates_too_small_for_bfloat16_still_add_up():
    """A norm weight of 1.0 in bfloat16 has its neighbour at 0.992, so steps of 6e-4 vanish without a master."""
    flat = Flat.of(1, torch.bfloat16)
    norms = {n: p for n, p in flat.module.named_parameters() if p.dim() == 1}
    assert all((p == 1).all() for p in norms.values())
    for _ in range(20):
        flat.step([torch.ones_like(p, dtype=torch.float32) for p in flat.parameters.parameters], 1.0, lr=6e-4)
    for name, parameter in norms.items():
        assert (parameter < 1).all(), name


@pytest.mark.parametrize("saved_with", SHARDS)
@pytest.mark.parametrize("loaded_with", SHARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_saved_with_some_drafters_goes_on_with_any_other_number(
    saved_with: int, loaded_with: int, dtype: torch.dtype
):
    unbroken, resumed = Flat.of(saved_with, dtype), Flat.of(loaded_with, dtype)
    gradients = [random_gradients(unbroken.parameters.parameters, seed) for seed in range(4)]
    for step in (0, 1):
        unbroken.step(gradients[step], 3.0, lr=1e-2)
    state = unbroken.state(2)
    layout = resumed.parameters.layout
    for name, view in layout.views(resumed.parameters.weights).items():
        view.copy_(compute_weights(state.tensors[f"master.{name}"], dtype))
    for index, optimizer in enumerate(resumed.optimizers):
        optimizer.load_state(cut_shard(state.tensors, layout, index, loaded_with))
    for step in (2, 3):
        unbroken.step([g.clone() for g in gradients[step]], 3.0, lr=1e-2)
        resumed.step(gradients[step], 3.0, lr=1e-2)
    close = torch.equal if saved_with == loaded_with else torch.allclose
    ours, theirs = resumed.state().tensors, unbroken.state().tensors
    assert all(close(ours[name], tensor) for name, tensor in theirs.items())
    assert unbroken.optimizers[0].state()["step"] == resumed.optimizers[-1].state()["step"] == 4


def test_joined_shards_name_every_parameter_and_hold_no_padding():
    flat = Flat.of(3)
    flat.step(random_gradients(flat.parameters.parameters, 0), 3.0, lr=1e-2)
    state = flat.state(1)
    assert state.weights().keys() == dict(flat.module.named_parameters()).keys()
    for name, parameter in flat.module.named_parameters():
        assert torch.equal(state.weights()[name], parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            assert state.tensors[f"{kind}.{name}"].shape == parameter.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_a_state_keeps_every_address(dtype: torch.dtype):
    flat = Flat.of(2, dtype)
    flat.step(random_gradients(flat.parameters.parameters, 0), 3.0, lr=1e-2)
    saved = [{n: t.clone() for n, t in o.state().items()} for o in flat.optimizers]
    addresses = [o.exp_avg.data_ptr() for o in flat.optimizers]
    weights = flat.parameters.weights.clone()
    flat.step(random_gradients(flat.parameters.parameters, 1), 3.0, lr=1e-2)
    for optimizer, state in zip(flat.optimizers, saved, strict=True):
        optimizer.load_state(state)
    assert [o.exp_avg.data_ptr() for o in flat.optimizers] == addresses
    assert torch.equal(flat.parameters.weights, weights)
    for optimizer, state in zip(flat.optimizers, saved, strict=True):
        assert all(torch.equal(t, state[n]) for n, t in optimizer.state().items())


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    config = OptimConfig(steps=100, lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    middle = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 45 / 90))
    assert rates[55] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 25])
def test_no_step_of_a_short_run_has_a_rate_of_zero_or_above_the_peak(num_steps: int):
    config = OptimConfig(steps=num_steps, lr=0.5)
    rates = [learning_rate(config, step, num_steps) for step in range(num_steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
