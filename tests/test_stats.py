"""A row's sums against a literal count, and how they turn into a step's figures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftline.drafter.loss import SlotLoss
from draftline.drafter.stats import read_stats, row_stats, stats_size


def slot_loss(correct: Tensor, cross_entropy: Tensor | None = None) -> SlotLoss:
    if cross_entropy is None:
        cross_entropy = torch.ones(correct.shape)
    return SlotLoss(cross_entropy, correct, torch.empty(0))


def literal_run(correct: list[bool], weights: list[float]) -> int:
    """Drafts kept of one block: count until the first that is wrong or not supervised."""
    kept = 0
    for right, weight in zip(correct, weights, strict=True):
        if not right or weight == 0:
            break
        kept += 1
    return kept


@st.composite
def blocks(draw) -> tuple[Tensor, Tensor, Tensor]:
    """correct bool [A, B - 1], weights [A, B] and anchor_valid [A], as rows have them (valid ones first)."""
    num_blocks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    table = st.lists(
        st.lists(st.booleans(), min_size=slots, max_size=slots), min_size=num_blocks, max_size=num_blocks
    )
    num_valid = draw(st.integers(0, num_blocks))
    valid = torch.arange(num_blocks) < num_valid
    weighted = torch.tensor(draw(table)) & valid[:, None]
    decay = torch.exp(-torch.arange(slots) / 4.0)
    weights = torch.cat([torch.zeros(num_blocks, 1), weighted * decay], dim=1)
    return torch.tensor(draw(table)), weights, valid


@given(blocks())
@settings(max_examples=150, deadline=None)
def test_figures_equal_a_literal_count(case: tuple[Tensor, Tensor, Tensor]):
    correct, weights, valid = case
    slots = correct.shape[1]
    step = read_stats(row_stats(slot_loss(correct), weights, valid), slots + 1)

    runs = [literal_run(c, w) for c, w in zip(correct.tolist(), weights[:, 1:].tolist(), strict=True)]
    num_valid = int(valid.sum())
    assert step.num_blocks == num_valid
    expected = 1 + sum(runs) / num_valid if num_valid else 0.0
    assert step.accept_anchor_mean == pytest.approx(expected)
    for slot in range(slots):
        supervised = (weights[:, 1 + slot] > 0).tolist()
        right = [c for c, s in zip(correct[:, slot].tolist(), supervised, strict=True) if s]
        assert step.top1_pos[slot] == pytest.approx(sum(right) / len(right) if right else 0.0)
        share = sum(run > slot for run in runs) / num_valid if num_valid else 0.0
        assert step.prefix_pos[slot] == pytest.approx(share)


@given(blocks(), st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_the_loss_is_the_weighted_mean_and_per_slot_figures_are_plain_means(case, seed: int):
    correct, weights, valid = case
    cross_entropy = torch.rand(correct.shape, generator=torch.Generator().manual_seed(seed)) * 9
    step = read_stats(row_stats(slot_loss(correct, cross_entropy), weights, valid), correct.shape[1] + 1)
    slots = weights[:, 1:]
    total = float(slots.sum())
    assert step.weight == pytest.approx(total)
    assert step.loss == pytest.approx(
        float((cross_entropy * slots).sum()) / total if total else 0.0, rel=1e-5
    )
    for slot in range(correct.shape[1]):
        supervised = cross_entropy[slots[:, slot] > 0, slot]
        mean = float(supervised.mean()) if len(supervised) else 0.0
        assert step.ce_pos[slot] == pytest.approx(mean, rel=1e-5)


def test_the_accepted_run_of_a_pooled_batch_is_not_a_product_of_accuracies():
    """speculators PR 1032's example: both blocks together keep 1 draft in the mean, products say otherwise."""
    correct = torch.tensor([[True, True], [False, False]])
    weights = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    step = read_stats(row_stats(slot_loss(correct), weights, torch.ones(2, dtype=torch.bool)), 3)
    assert step.accept_anchor_mean == 2.0  # 1 + (2 + 0) / 2
    product = 1 + step.top1_pos[0] + step.top1_pos[0] * step.top1_pos[1]
    assert product == 1.75


def test_a_nan_in_a_slot_without_weight_spoils_no_figure():
    correct = torch.tensor([[True, False]])
    cross_entropy = torch.tensor([[2.0, float("nan")]])
    weights = torch.tensor([[0.0, 1.0, 0.0]])
    vector = row_stats(slot_loss(correct, cross_entropy), weights, torch.ones(1, dtype=torch.bool))
    assert vector.isfinite().all()
    assert read_stats(vector, 3).loss == 2.0


def test_sums_of_rows_add_up_to_the_sums_of_all_their_blocks():
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(6, 3, generator=generator) < 0.6
    weights = torch.rand(6, 4, generator=generator) * (torch.rand(6, 4, generator=generator) < 0.7)
    valid = torch.ones(6, dtype=torch.bool)
    together = row_stats(slot_loss(correct), weights, valid)
    parts = [
        row_stats(slot_loss(correct[cut]), weights[cut], valid[cut]) for cut in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0] + parts[1], together)


def test_a_step_without_any_anchor_reads_as_zero():
    step = read_stats(torch.zeros(stats_size(4)), 4)
    assert (step.loss, step.weight, step.num_blocks, step.accept_anchor_mean) == (0.0, 0.0, 0, 0.0)
    assert step.prefix_pos == (0.0, 0.0, 0.0)
