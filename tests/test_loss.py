"""The loss against plain autograd cross-entropy, and what must not reach its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftline.drafter.loss import frozen_head_loss

TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5}
"""Cross-entropy is taken in fp32 whatever the hidden states are, so fp64 inputs agree to fp32 rounding."""


@dataclass
class Case:
    hidden: Tensor  # [A * B, D]
    head: Tensor  # [V, D]
    labels: Tensor  # int64 [A, B]
    weights: Tensor  # float32 [A, B]


def random_case(
    blocks: int, block_size: int, hidden: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32
) -> Case:
    """Random states, labels and weights; slot 0 and about a third of the others weigh nothing."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(blocks, block_size, generator=generator)
    weights[torch.rand(blocks, block_size, generator=generator) < 0.3] = 0.0
    weights[:, 0] = 0.0
    return Case(
        hidden=torch.randn(blocks * block_size, hidden, generator=generator, dtype=dtype),
        head=torch.randn(vocab, hidden, generator=generator, dtype=dtype),
        labels=torch.randint(0, vocab, (blocks, block_size), generator=generator),
        weights=weights,
    )


def ours(case: Case, chunk_rows: int = 1024):
    return frozen_head_loss(case.hidden, case.head, case.labels, case.weights, chunk_rows)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Cross-entropy [A, B] and d(sum w*CE)/d hidden [A * B, D], by PyTorch alone."""
    hidden = case.hidden.detach().requires_grad_()
    logits = hidden @ case.head.T
    cross_entropy = F.cross_entropy(logits, case.labels.flatten(), reduction="none")
    (gradient,) = torch.autograd.grad((cross_entropy * case.weights.flatten()).sum(), hidden)
    return cross_entropy.detach().view(case.labels.shape), gradient


@given(
    blocks=st.integers(1, 6),
    block_size=st.integers(2, 9),
    hidden=st.integers(1, 24),
    vocab=st.integers(1, 40),
    chunk_rows=st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_value_and_gradient_equal_plain_cross_entropy(
    blocks: int, block_size: int, hidden: int, vocab: int, chunk_rows: int, dtype: torch.dtype, seed: int
):
    case = random_case(blocks, block_size, hidden, vocab, seed, dtype)

    loss, (cross_entropy, gradient) = ours(case, chunk_rows), plain(case)

    close = {"rtol": TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype], "check_dtype": False}
    torch.testing.assert_close(loss.cross_entropy, cross_entropy[:, 1:], **close)
    torch.testing.assert_close(loss.gradient, gradient, **close)
    best = (case.hidden @ case.head.T).argmax(-1).view(case.labels.shape)
    assert torch.equal(loss.correct, (best == case.labels)[:, 1:])


def test_of_equal_logits_the_first_counts_as_the_best_as_argmax_has_it():
    """In bfloat16 two tokens often share the largest logit; a greedy decoder takes one of them."""
    case = random_case(blocks=4, block_size=6, hidden=8, vocab=10, seed=7)
    case.hidden.round_()  # whole numbers, whose products are exact in any order
    case.head.round_()
    case.head[5:] = case.head[:5]  # each row twice
    best = (case.hidden @ case.head.T).argmax(-1)
    for shift, correct in ((0, True), (5, False)):
        case.labels.copy_((best + shift).view(case.labels.shape))
        assert (ours(case).correct == correct).all()


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 20, 21, 22, 1000])
def test_the_chunk_size_changes_no_slot(chunk_rows: int):
    case = random_case(blocks=3, block_size=8, hidden=16, vocab=50, seed=1)
    whole, cut = ours(case), ours(case, chunk_rows)
    torch.testing.assert_close(cut.cross_entropy, whole.cross_entropy)
    torch.testing.assert_close(cut.gradient, whole.gradient)
    assert torch.equal(cut.correct, whole.correct)


def test_slot_zero_and_slots_without_weight_move_nothing():
    case = random_case(blocks=5, block_size=6, hidden=16, vocab=50, seed=2)
    gradient = ours(case).gradient.view(5, 6, 16)
    unweighted = case.weights == 0
    assert unweighted[:, 1:].any()
    assert not unweighted.all()
    assert torch.equal(gradient[unweighted], torch.zeros_like(gradient[unweighted]))
    assert (gradient[~unweighted].abs().amax(-1) > 0).all()


def test_garbage_in_slots_without_weight_changes_no_other_slot():
    case = random_case(blocks=5, block_size=6, hidden=16, vocab=50, seed=3)
    before = ours(case)
    unweighted = (case.weights == 0).flatten()
    case.hidden[unweighted] = 1e30  # logits far beyond fp32's exponentials, and labels that no longer fit
    case.labels.view(-1)[unweighted] = 0
    after = ours(case)
    assert torch.equal(after.gradient[~unweighted], before.gradient[~unweighted])
    assert torch.equal(after.gradient[unweighted], torch.zeros_like(after.gradient[unweighted]))


def test_slot_zero_is_never_looked_at():
    case = random_case(blocks=4, block_size=5, hidden=8, vocab=20, seed=4)
    before = ours(case)
    case.hidden.view(4, 5, 8)[:, 0] = float("nan")
    after = ours(case)
    assert torch.equal(after.gradient, before.gradient)
    assert torch.equal(after.cross_entropy, before.cross_entropy)


def test_a_nan_behind_a_zero_weight_is_not_hidden():
    """Hidden states follow from weights and taps: a NaN in any slot that is computed means that one of those
    is broken, so it has to reach the gradient, where the update is withheld and the run stops."""
    case = random_case(blocks=4, block_size=5, hidden=8, vocab=20, seed=5)
    case.weights[2, 3] = 0.0
    case.hidden.view(4, 5, 8)[2, 3] = float("nan")
    assert ours(case).gradient.isnan().any()


def test_blocks_of_padding_contribute_nothing():
    case = random_case(blocks=3, block_size=4, hidden=8, vocab=20, seed=6)
    padded = Case(
        hidden=torch.cat([case.hidden, torch.randn(8, 8)]),
        head=case.head,
        labels=F.pad(case.labels, (0, 0, 0, 2)),
        weights=F.pad(case.weights, (0, 0, 0, 2)),
    )
    alone, more = ours(case), ours(padded)
    torch.testing.assert_close(more.gradient[:12], alone.gradient)
    assert torch.equal(more.gradient[12:], torch.zeros(8, 8))


def test_an_uninformed_drafter_starts_at_the_logarithm_of_the_vocabulary():
    case = random_case(blocks=2, block_size=4, hidden=8, vocab=20, seed=7)
    case.hidden.zero_()
    torch.testing.assert_close(ours(case).cross_entropy, torch.full((2, 3), 20.0).log())


def test_half_precision_logits_are_compared_in_fp32():
    case = random_case(blocks=4, block_size=5, hidden=8, vocab=20, seed=8)
    half = Case(case.hidden.bfloat16(), case.head.bfloat16(), case.labels, case.weights)
    loss = ours(half)
    logits = (half.hidden @ half.head.T).float()
    expected = F.cross_entropy(logits, case.labels.flatten(), reduction="none").view(4, 5)
    assert loss.cross_entropy.dtype == torch.float32
    assert loss.gradient.dtype == torch.bfloat16
    torch.testing.assert_close(loss.cross_entropy, expected[:, 1:])
