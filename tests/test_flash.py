"""FlashAttention 4 as far as no GPU is needed: its rule, its operators around a dense stand-in, and what is refused.

The kernels themselves exist on Hopper GPUs only and are checked in tests/gpu/flash.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftline.config import DrafterSpec, PlacementConfig
from draftline.data.rows import RowShape, RowSource
from draftline.data.synthetic import SyntheticStore
from draftline.data.tables import BlockTables
from draftline.data.transfer import DeviceRow
from draftline.drafter import flash
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.flash import context_bounds, flash_attend, sees
from draftline.drafter.flash_proof import prove_flash
from draftline.drafter.mask import block_mask_dense, mask_mod
from draftline.drafter.step import distinct_windows
from draftline.errors import AttentionFallbackError, ConfigError
from draftline.flash import flash_packed, kernels, refuse_flash, unused_flash
from draftline.pipeline.build import _closeness
from draftline.pipeline.costs import DrafterCost
from draftline.pipeline.memory import Sizes, drafter_worker
from draftline.pipeline.plan import make_plan, plan_for_gpus
from draftline.quiet import hold_back
from draftline.target.attention import choose_kernel
from tests.oracles.tiny import MIXED, TinyRow, packed_row, random_drafter, row_hidden, row_masks, tiny_spec

WINDOWS = st.one_of(st.none(), st.integers(4, 40))
CUDA = torch.device("cuda", 0)


def dense_rule(row: TinyRow, block_size: int, lower: Tensor, upper: Tensor, *, causal: bool) -> Tensor:
    """`sees` for every pair, [Q, S + Q]."""
    num_context, num_queries = len(row.positions), len(row.anchors) * block_size
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_context + num_queries)[None]
    above = upper.repeat_interleave(block_size)[:, None]
    return sees(query, key, lower[:, None], above, num_context, block_size, causal)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    window=WINDOWS,
    causal=st.booleans(),
    data=st.data(),
)
def test_bounds_say_the_same_as_the_rule_of_every_backend(
    lengths: list[int], window: int | None, causal: bool, data: st.DataObject
):
    spec = tiny_spec()
    anchors = data.draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=6).map(sorted))
    row = packed_row(spec, tuple(lengths), anchors, num_padding=data.draw(st.integers(0, 5)))
    rule: dict[str, Any] = {"block_size": spec.block_size, "window": window, "causal": causal}

    bounds = context_bounds(row.anchors, row.anchor_valid, row.positions, **rule)

    found = dense_rule(row, spec.block_size, bounds.lower, bounds.upper, causal=causal)
    assert bounds.lower.dtype == bounds.upper.dtype == torch.int32
    assert torch.equal(
        found, block_mask_dense(row.anchors, row.anchor_valid, row.document_ids, row.positions, **rule)
    )


class DenseKernels:
    """In place of the package on a CPU: its two entries, dense, with the same arguments and outputs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @staticmethod
    def _scores(q: Tensor, k: Tensor, rule: Any, bounds: list[Tensor]) -> tuple[Tensor, Tensor]:
        lower, upper = bounds
        query, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
        seen = rule(query, key, lower[:, None], upper.repeat_interleave(q.shape[1] // len(upper))[:, None])
        keys = k[0].repeat_interleave(q.shape[2] // k.shape[2], dim=1)  # [S + Q, H, hd]
        return torch.einsum("qhd,khd->hqk", q[0], keys) * q.shape[-1] ** -0.5, seen

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask_mod: Any, block_sparse_tensors: Any, aux_tensors: Any,
        return_lse: bool, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        assert return_lse
        assert len(block_sparse_tensors) == 4
        self.calls.append("forward")
        scores, seen = self._scores(q, k, mask_mod, aux_tensors)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse.copy_(scores.logsumexp(dim=-1)[None])
        values = v[0].repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1).nan_to_num(), values)[None])

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, mask_mod: Any,
        block_sparse_tensors: Any, aux_tensors: Any, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        assert len(block_sparse_tensors) == 4
        self.calls.append("backward")
        group = q.shape[2] // k.shape[2]
        scores, seen = self._scores(q, k, mask_mod, aux_tensors)
        share = torch.where(seen, (scores - lse[0].nan_to_num(neginf=0.0)[..., None]).exp(), 0.0).to(q.dtype)
        keys, values = (x[0].repeat_interleave(group, dim=1) for x in (k, v))
        of_values = torch.einsum("hqk,qhd->khd", share, dout[0])
        slope = torch.einsum("qhd,khd->hqk", dout[0], values) - (out[0] * dout[0]).sum(-1).T[..., None]
        slope = share * slope * q.shape[-1] ** -0.5
        dq.copy_(torch.einsum("hqk,khd->qhd", slope, keys)[None])
        of_keys = torch.einsum("hqk,qhd->khd", slope, q[0])
        for into, each in ((dk, of_keys), (dv, of_values)):
            into.copy_(each.unflatten(1, (-1, group)).sum(dim=2)[None])


@pytest.fixture
def dense_kernels(monkeypatch: pytest.MonkeyPatch) -> DenseKernels:
    found = DenseKernels()

    def rule(num_context: int, block_size: int, causal: bool) -> Any:
        return lambda q, k, lower, upper: sees(q, k, lower, upper, num_context, block_size, causal)

    monkeypatch.setattr(flash, "kernels", lambda: found)
    monkeypatch.setattr(flash, "make_rule", rule)
    monkeypatch.setattr(flash, "_tiles", tuple)
    return found


UNREAD = BlockTables(*[torch.zeros(1, dtype=torch.int32)] * 8)
"""Tables that the stand-in does not read."""


@pytest.mark.parametrize("layers", [{}, {"layer_types": MIXED, "sliding_window": 6}])
def test_a_drafter_has_the_outputs_and_gradients_of_dense_attention(
    layers: dict[str, Any], dense_kernels: DenseKernels
):
    spec = tiny_spec(**layers)
    drafter = random_drafter(spec)
    row = packed_row(spec, (17, 9, 14), [0, 1, 7, 16, 17, 20, 26, 33, 39], num_padding=3)
    bounds = [
        context_bounds(
            row.anchors, row.anchor_valid, row.positions, block_size=spec.block_size,
            window=spec.window_of(layer), causal=spec.causal_in_block(layer),
        )
        for layer in range(spec.num_layers)
    ]  # fmt: skip
    attends = flash_attend([UNREAD] * spec.num_layers, bounds), sdpa_attend(row_masks(spec, row))

    found = []
    for attend in attends:
        hidden = row_hidden(drafter, row, attend)
        found.append(
            [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), tuple(drafter.parameters()))]
        )

    assert dense_kernels.calls == ["forward"] * 3 + ["backward"] * 3
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def small_row(windows: tuple[Any, ...], lengths: list[int]) -> DeviceRow:
    shape = RowShape(256, 64, 4, 16, 2.0, windows)
    store = SyntheticStore(np.array(lengths, dtype=np.int32), 97)
    return DeviceRow(RowSource(store, shape, seed=0).row(0), torch.device("cpu"))


def proven(spec: DrafterSpec, row: DeviceRow) -> float | None:
    fixed = row.anchors, row.anchor_valid, row.positions
    kinds = []
    for window, causal in distinct_windows(spec):
        rule: dict[str, Any] = {"block_size": spec.block_size, "window": window, "causal": causal}
        seen = mask_mod(row.anchors, row.anchor_valid, row.document_ids, row.positions, **rule)
        kinds.append((context_bounds(*fixed, **rule), seen))
    return prove_flash(spec, row, kinds, torch.float32)


@pytest.mark.parametrize("layers", [{}, {"layer_types": MIXED, "sliding_window": 6}])
def test_right_kernels_are_proven_before_a_run_uses_them(layers: dict[str, Any], dense_kernels: DenseKernels):
    spec = tiny_spec(**layers)
    kinds = distinct_windows(spec)
    distance = proven(spec, small_row(kinds, [60, 50, 90, 40]))
    assert distance is not None
    assert distance < 1e-5
    assert dense_kernels.calls == ["forward", "backward"] * len(kinds)


@pytest.mark.parametrize(("wrong", "words"), [("out", "outputs"), ("dq", "dq"), ("dk", "dk"), ("dv", "dv")])
def test_kernels_that_compute_something_else_end_the_start(
    wrong: str, words: str, dense_kernels: DenseKernels, monkeypatch: pytest.MonkeyPatch
):
    entry = "_flash_attn_fwd" if wrong == "out" else "_flash_attn_bwd"
    right = getattr(dense_kernels, entry)

    def broken(*tensors: Tensor, **rest: Any) -> None:
        right(*tensors, **rest)
        rest[wrong].mul_(1.05)

    monkeypatch.setattr(dense_kernels, entry, broken)
    spec = tiny_spec()
    row = small_row(distinct_windows(spec), [60, 50, 90, 40])
    with pytest.raises(
        AttentionFallbackError,
        match=rf"wrong for heads of 16 on cpu: its {words} are 0\.05.*attention: flex",
    ):
        proven(spec, row)


@pytest.mark.usefixtures("dense_kernels")
def test_a_row_without_a_block_proves_nothing_and_says_so():
    spec = tiny_spec()
    row = small_row(distinct_windows(spec), [60, 50, 90, 40])
    row.anchor_valid.zero_()
    assert proven(spec, row) is None
    assert "not compared" in _closeness(None)
    assert "2.4e-03" in _closeness(0.0024)


def test_a_compiler_that_traces_the_operators_gets_the_shapes_of_their_results():
    with FakeTensorMode():
        q, k = (torch.empty(n, h, 8, dtype=torch.bfloat16, requires_grad=True) for n, h in ((32, 4), (96, 2)))
        upper = torch.empty(8, dtype=torch.int32)
        out, sums = flash.flash_blocks(q, k, k, upper, upper, [upper] * 8, False)
        slopes = torch.autograd.grad(out, (q, k), torch.empty_like(out))
        packed = flash_packed(q, k, k, upper, 96, None, 5)
    assert (out.shape, out.dtype, sums.shape, sums.dtype) == (q.shape, q.dtype, (4, 32), torch.float32)
    assert [slope.shape for slope in slopes] == [q.shape, k.shape]
    assert packed.shape == q.shape


def test_a_packed_target_attends_by_the_windows_and_documents_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
):
    calls = []
    kernel = type(
        "Kernels", (), {"_flash_attn_fwd": lambda _, *tensors, **rest: calls.append((tensors, rest))}
    )
    monkeypatch.setattr("draftline.flash.kernels", kernel)
    q, k, bounds = torch.ones(12, 4, 8), torch.ones(12, 2, 8), torch.tensor([0, 5, 12], dtype=torch.int32)
    for window in (None, 6):
        flash_packed(q, k, k, bounds, 12, 0.25, window)
    (tensors, full), (_, sliding) = calls
    assert [x.shape for x in tensors] == [q.shape, k.shape, k.shape]
    assert (full["causal"], full["window_size_left"], full["window_size_right"]) == (True, None, None)
    assert (sliding["causal"], sliding["window_size_left"], sliding["window_size_right"]) == (False, 5, 0)
    assert full["softmax_scale"] == 0.25
    assert torch.equal(full["cu_seqlens_q"], bounds)


@pytest.mark.parametrize(
    ("change", "target_head_dim", "dtype", "words"),
    [
        ({}, 64, torch.float32, "drafter_dtype is float32; leave drafter_dtype out"),
        ({"head_dim": 80}, 64, torch.bfloat16, "heads of 64 or 128, and this one's are of 80; set drafter.head_dim"),
        ({}, 512, torch.bfloat16, "multiples of 8 up to 256, and this one's are of 512;"),
        ({}, 100, torch.bfloat16, "multiples of 8 up to 256, and this one's are of 100;"),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_compute_is_refused_with_the_way_out(
    change: dict[str, Any], target_head_dim: int, dtype: torch.dtype, words: str
):
    with pytest.raises(ConfigError, match=f"{words}.*use placement.attention: flex"):
        refuse_flash(tiny_spec(**{"head_dim": 64, **change}), target_head_dim, dtype, ())
    refuse_flash(tiny_spec(head_dim=64), 256, torch.bfloat16, ())


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_a_gpu_that_is_not_a_hopper_is_refused_by_its_capability(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", flash)  # any module: it is only imported
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(
        ConfigError, match=rf"cuda:0 has compute capability {capability[0]}\.0, .* use such a GPU"
    ):
        refuse_flash(tiny_spec(head_dim=64), 64, torch.bfloat16, [CUDA])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    refuse_flash(tiny_spec(head_dim=64), 64, torch.bfloat16, [CUDA])


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(
        ConfigError, match=r"pip install 'draftline\[flash\]', or use placement.attention: flex"
    ):
        kernels()


def test_a_package_that_lies_idle_is_told_where_it_could_be_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("draftline.flash.installed_version", lambda: None)
    assert unused_flash("auto", 64, [CUDA]) is None
    monkeypatch.setattr("draftline.flash.installed_version", lambda: "4.0.0b36")
    assert "placement.attention=flash" in (unused_flash("auto", 64, [CUDA]) or "")
    assert unused_flash("flex", 64, [CUDA]) is None
    assert unused_flash("auto", 256, [CUDA]) is None
    assert unused_flash("auto", 64, [torch.device("cpu")]) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert unused_flash("auto", 64, [CUDA]) is None


def test_a_cpu_is_refused_and_a_gpu_gets_it_only_where_it_is_asked_for():
    with pytest.raises(
        ConfigError, match=r"flash needs GPUs: .* use attention: sdpa or auto; .* plan .*--devices"
    ):
        make_plan(PlacementConfig(attention="flash", targets=("cpu",), drafters=("cpu",)))
    assert plan_for_gpus(PlacementConfig()).backend == "flex"
    plan = plan_for_gpus(PlacementConfig(attention="flash"))
    assert plan.backend == "flash"
    assert any("FlashAttention 4" in line and "last bits" in line for line in plan.describe())


def test_a_target_uses_it_where_its_kernels_exist():
    assert choose_kernel(CUDA, torch.bfloat16, flash=True) == "flash"
    assert choose_kernel(CUDA, torch.bfloat16, flash=False) == "varlen"
    assert choose_kernel(CUDA, torch.float32, flash=True) == "mask"
    assert choose_kernel(torch.device("cpu"), torch.bfloat16, flash=True) == "mask"


@pytest.mark.parametrize(("kv_heads", "summed"), [(2, 2), (4, 0)])
def test_the_sums_that_its_backward_keeps_are_counted(kv_heads: int, summed: int):
    spec = tiny_spec(num_heads=4, num_kv_heads=kv_heads, head_dim=16)
    cost = DrafterCost(spec, tokens=256, blocks=32)
    flex, ours = (
        drafter_worker(cost, Sizes(2, 2, True, False, each, 3, 1024, 1), 1, split=False)
        for each in (False, True)
    )
    queries = 32 * spec.block_size
    assert ours.total - flex.total == 4 * (queries * 4 * 16 + 2 * (256 + queries) * summed * 16)


def test_the_command_holds_back_what_the_package_says_of_its_own_argument():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hold_back()
        warnings.warn("Argument aux_data (position 17) cannot be converted to a JitArgument", stacklevel=1)
        warnings.warn("Argument other (position 17) cannot be converted to a JitArgument", stacklevel=1)
    assert ["other" in str(each.message) for each in heard] == [True]
