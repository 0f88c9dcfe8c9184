"""One row's step: its gradient against plain autograd, and the rows' independence of how they are laid out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.compiling.graphs import LaunchedStep
from draftline.config import DrafterSpec
from draftline.data.document import Document
from draftline.data.rows import Row, RowShape, row_from_documents
from draftline.data.transfer import DeviceRow
from draftline.drafter.attention import sdpa_attend
from draftline.drafter.blocks import opening_tokens
from draftline.drafter.mask import block_mask_dense
from draftline.drafter.model import Drafter
from draftline.drafter.step import AccumulatingStep, Compile, DrafterStep
from draftline.optim import FlatParameters
from draftline.target.states import TargetStates
from tests.oracles.tiny import random_drafter, tiny_spec

BLOCK, VOCAB = 8, 97
SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding, causal": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12},
    "sliding, both ways": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 12,
        "is_causal": False,
    },
    "scaled embedding": {"input_embedding_scale": 3.5},
}


def spec_of(**changes: Any) -> DrafterSpec:
    fields = {"block_size": BLOCK, "num_layers": 2, "layer_types": ("full_attention",) * 2, **changes}
    return tiny_spec(**fields)


def shape(token_budget: int = 128, block_budget: int = 32, anchors_per_document: int = 512) -> RowShape:
    return RowShape(token_budget, block_budget, BLOCK, anchors_per_document, 4.0, ())


def document(length: int, seed: int, prompt: int = 3) -> Document:
    draws = np.random.default_rng(seed)
    return Document(draws.integers(0, VOCAB - 1, length).astype(np.int32), np.arange(length) >= prompt)


@dataclass(frozen=True)
class Frozen:
    """The target's tables, and taps that depend on a token's document alone, as a real target's do."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]
    tap_table: Tensor  # [V, K * D]

    @classmethod
    def of(cls, spec: DrafterSpec) -> Frozen:
        generator = torch.Generator().manual_seed(5)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        width = spec.num_taps * spec.hidden_size
        return cls(draw(VOCAB, spec.hidden_size), draw(VOCAB, spec.hidden_size), draw(VOCAB, width))

    def taps(self, row: Row) -> Tensor:
        """[T, K * D]; padding holds other finite values, as the target leaves them."""
        return (
            self.tap_table[row.input_ids]
            + 0.1 * row.positions[:, None]
            + row.document_ids[:, None].lt(0) * 7.0
        )


@dataclass(frozen=True)
class Totals:
    """Sums over rows."""

    stats: Tensor
    gradients: dict[str, Tensor]


def step_over(
    spec: DrafterSpec, rows: list[Row], chunk_rows: int = 1024, compile_function: Compile | None = None
) -> Totals:
    """Run the trainer's own step over rows, in fp64, and read its accumulators."""
    drafter, frozen = random_drafter(spec), Frozen.of(spec)
    parameters = FlatParameters(drafter, 1, torch.float64)
    cpu = torch.device("cpu")
    device_row = DeviceRow(rows[0], cpu)
    shape = len(rows[0].input_ids), spec.num_taps, len(rows[0].anchors), spec.hidden_size
    states = TargetStates.zeros(*shape, like=frozen.head)
    step = DrafterStep(
        drafter, parameters, frozen.head, device_row, states, "sdpa", chunk_rows, compile_function
    )
    whole = AccumulatingStep(LaunchedStep(step.run), parameters.write, parameters.accumulate)
    for order, row in enumerate(rows):
        device_row.load(row)
        states.taps.copy_(frozen.taps(row))
        openings = opening_tokens(row.input_ids, row.anchors, row.anchor_valid, spec.mask_token_id)
        states.token_rows.copy_(frozen.embedding[openings])
        whole.replay(first=order == 0)
    return Totals(step.stats, parameters.layout.views(parameters.gradients))


def plain_autograd(spec: DrafterSpec, row: Row) -> tuple[float, dict[str, Tensor]]:
    """The same sum of w * CE with a dense mask and nothing of the trainer's step."""
    drafter, frozen = random_drafter(spec), Frozen.of(spec)
    ids = torch.full((len(row.anchors), BLOCK), spec.mask_token_id)
    ids[:, 0] = torch.where(row.anchor_valid, row.input_ids[row.anchors], spec.mask_token_id)
    positions = row.positions[row.anchors][:, None] + torch.arange(BLOCK)
    masks = [
        block_mask_dense(
            row.anchors,
            row.anchor_valid,
            row.document_ids,
            row.positions,
            block_size=BLOCK,
            window=spec.window_of(layer),
            causal=spec.causal_in_block(layer),
        )
        for layer in range(spec.num_layers)
    ]
    embeds = frozen.embedding[ids.flatten()] * spec.input_embedding_scale
    hidden = drafter(embeds, frozen.taps(row), row.positions, positions.flatten(), sdpa_attend(masks))
    cross_entropy = F.cross_entropy(hidden @ frozen.head.T, row.labels.flatten(), reduction="none")
    loss = (cross_entropy * row.weights.flatten()).sum()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Relative to each gradient's largest entry: the loss is taken in fp32."""
    for name, gradient in theirs.items():
        distance = (ours[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30)
        assert distance < tolerance, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
def test_the_gradient_of_a_row_equals_plain_autograd_through_the_dense_mask(changes: dict[str, Any]):
    spec = spec_of(**changes)
    row = row_from_documents(0, [document(40, 1), document(5, 2), document(61, 3)], shape(), seed=0)
    assert int(row.anchor_valid.sum()) > 0
    totals = step_over(spec, [row])
    loss, gradients = plain_autograd(spec, row)
    assert float(totals.stats[0]) == pytest.approx(loss, rel=1e-6)
    assert set(gradients) == set(totals.gradients)
    close(totals.gradients, gradients)


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
def test_packed_documents_give_the_loss_and_gradient_they_give_alone(changes: dict[str, Any]):
    documents = [document(length, seed) for seed, length in enumerate([31, 9, 24, 17])]
    everything = shape(token_budget=128, block_budget=128)  # room for every anchor, so none is drawn away
    packed = row_from_documents(0, documents, everything, seed=0)
    alone = [row_from_documents(i, [d], everything, seed=0) for i, d in enumerate(documents)]
    assert int(packed.anchor_valid.sum()) == sum(int(row.anchor_valid.sum()) for row in alone)

    together, apart = step_over(spec_of(**changes), [packed]), step_over(spec_of(**changes), alone)

    torch.testing.assert_close(together.stats, apart.stats, rtol=1e-5, atol=1e-4)
    close(together.gradients, apart.gradients)


def test_the_order_of_documents_in_a_row_changes_nothing():
    documents = [document(length, seed) for seed, length in enumerate([31, 9, 24])]
    everything = shape(block_budget=128)
    one = row_from_documents(0, documents, everything, seed=0)
    other = row_from_documents(0, documents[::-1], everything, seed=0)
    first, second = step_over(spec_of(), [one]), step_over(spec_of(), [other])
    torch.testing.assert_close(first.stats, second.stats, rtol=1e-5, atol=1e-4)
    close(first.gradients, second.gradients)


def test_padding_blocks_and_padding_tokens_contribute_nothing():
    documents = [document(31, 0), document(20, 1)]
    small = row_from_documents(0, documents, shape(token_budget=128, block_budget=48), seed=0)
    large = row_from_documents(0, documents, shape(token_budget=256, block_budget=128), seed=0)
    few, many = step_over(spec_of(), [small]), step_over(spec_of(), [large])
    torch.testing.assert_close(few.stats, many.stats)
    close(few.gradients, many.gradients, 1e-6)


def test_what_padding_slots_are_labelled_with_does_not_matter():
    row = row_from_documents(0, [document(31, 0), document(20, 1)], shape(), seed=0)
    unweighted = row.weights == 0
    relabelled = replace(row, labels=row.labels.masked_fill(unweighted, VOCAB - 1))
    first, second = step_over(spec_of(), [row]), step_over(spec_of(), [relabelled])
    torch.testing.assert_close(first.stats, second.stats)
    close(first.gradients, second.gradients, 1e-9)


def test_loss_and_gradient_do_not_depend_on_the_chunk_size():
    row = row_from_documents(0, [document(60, 0), document(50, 1)], shape(), seed=0)
    whole, cut = step_over(spec_of(), [row]), step_over(spec_of(), [row], chunk_rows=13)
    torch.testing.assert_close(whole.stats, cut.stats)
    close(whole.gradients, cut.gradients, 1e-6)


def test_a_row_without_any_anchor_adds_nothing_and_does_not_fail():
    silent = Document(np.arange(20, dtype=np.int32), np.zeros(20, dtype=bool))
    row = row_from_documents(0, [silent], shape(), seed=0)
    assert not row.anchor_valid.any()
    totals = step_over(spec_of(), [row])
    assert torch.equal(totals.stats, torch.zeros_like(totals.stats))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in totals.gradients.values())


def test_every_parameter_gets_a_gradient():
    row = row_from_documents(0, [document(60, 0)], shape(), seed=0)
    totals = step_over(spec_of(), [row])
    assert set(totals.gradients) == {name for name, _ in Drafter(spec_of()).named_parameters()}
    assert all(g.abs().max() > 0 for g in totals.gradients.values())


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, 128])
def test_documents_of_any_length_give_a_finite_loss(length: int):
    """One supervised pair, less than a block, a block, and an answer that ends where the row does."""
    row = row_from_documents(0, [document(length, 0, prompt=0)], shape(), seed=0)
    totals = step_over(spec_of(), [row])
    assert int(row.anchor_valid.sum()) > 0
    assert totals.stats.isfinite().all()
    assert float(totals.stats[1]) > 0


def test_the_last_hidden_states_are_gone_when_backward_begins():
    held: list[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            result = function(*inputs)
            if isinstance(
                result, Tensor
            ):  # of the step's functions one gives a tensor alone: the hidden states
                assert result.grad_fn is not None
                reference = weakref.ref(result)
                result.grad_fn.register_prehook(lambda _: held.append(reference() is not None))
            return result

        return call

    row = row_from_documents(0, [document(40, 1)], shape(), seed=0)
    step_over(spec_of(), [row], compile_function=watched)

    assert held == [False]
