"""Sampled speculative decoding has the target's distribution, whatever the drafter proposes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftline.decoding.decode import decode
from draftline.decoding.greedy import CachedTarget, Limit
from draftline.decoding.sampling import Greedy, Sampled, leading_run
from draftline.errors import ConfigError
from tests.oracles.targets import VOCABULARY, fitting_drafter, random_target, taught_drafter

CPU = torch.device("cpu")


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic over cells that are expected at least five times, the others pooled."""
    large = expected >= 5
    pooled = torch.tensor([counts[~large].sum(), expected[~large].sum()])
    statistic = ((counts[large] - expected[large]) ** 2 / expected[large]).sum()
    return float(statistic + (pooled[0] - pooled[1]) ** 2 / pooled[1].clamp_min(1))


def critical(cells: int) -> float:
    """Upper 0.1 % point of chi squared by Wilson and Hilferty; seeds are fixed, so this never flickers."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def random_logits(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_the_first_two_tokens_of_a_block_follow_the_target(settings):
    target, proposal = random_logits(2, 6, seed=1), random_logits(1, 6, seed=2)
    choice = Sampled(seed=0, device=CPU, **settings)
    pairs = torch.zeros(6, 6)
    firsts, draws = torch.zeros(6), 3000

    for _ in range(draws):
        drafts = choice.propose(proposal)
        verdict = choice.verify(drafts, target)
        if verdict.accepted:
            firsts[drafts[0]] += 1
            pairs[drafts[0], verdict.bonus] += 1
        else:
            firsts[verdict.bonus] += 1

    wanted = choice.probabilities(target)
    assert chi_squared(firsts, draws * wanted[0]) < critical(6)
    assert chi_squared(pairs.sum(0), pairs.sum() * wanted[1]) < critical(6)


def test_the_statistic_notices_a_rule_that_takes_every_draft():
    target, proposal = random_logits(2, 6, seed=1), random_logits(1, 6, seed=2)
    choice, draws = Sampled(seed=0, device=CPU), 3000
    firsts = torch.bincount(torch.cat([choice.propose(proposal) for _ in range(draws)]), minlength=6)

    assert chi_squared(firsts.float(), draws * choice.probabilities(target)[0]) > 10 * critical(6)


def test_a_whole_answer_follows_the_target():
    """Three tokens by the real decoder with a drafter that is often right, against exact probabilities."""
    target = random_target(dtype=torch.float64)
    drafter = taught_drafter(target)
    prompt, draws = [1, 2, 3], 250
    counts, kept = torch.zeros(VOCABULARY), 0

    for seed in range(draws):
        choice = Sampled(seed, CPU, temperature=2.0, top_k=3)
        decoded = decode(target, drafter, prompt, Limit(3), choice)
        counts[decoded.tokens[2]] += 1
        kept += sum(decoded.accepted)

    assert kept > 0.1 * draws
    assert chi_squared(counts, draws * exact_third_token(target, prompt)) < critical(VOCABULARY)


def exact_third_token(target, prompt):
    """Distribution of the third token, by summing over the first two."""
    choice = Sampled(0, CPU, temperature=2.0, top_k=3)

    def following(tokens: list[int]) -> Tensor:
        fed = CachedTarget(target).feed(torch.tensor(tokens), num_logits=1)
        return choice.probabilities(fed.logits)[-1].double()

    third = torch.zeros(VOCABULARY, dtype=torch.float64)
    first = following(prompt)
    for a in first.nonzero()[:, 0].tolist():
        second = following([*prompt, a])
        for b in second.nonzero()[:, 0].tolist():
            third += first[a] * second[b] * following([*prompt, a, b])
    return third.float()


def test_the_same_seed_gives_the_same_answer():
    target = random_target()
    drafter = fitting_drafter(target)
    answers = [decode(target, drafter, [1, 2], Limit(20), Sampled(7, CPU)).tokens for _ in range(2)]
    assert answers[0] == answers[1]


def test_equal_distributions_are_never_rejected():
    logits = random_logits(3, 6, seed=1)
    choice = Sampled(seed=0, device=CPU)
    for _ in range(50):
        drafts = choice.propose(logits[:2])
        assert choice.verify(drafts, logits).accepted == 2


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = Sampled(0, CPU, top_p=0.7).probabilities(logits)[0]
    assert torch.allclose(kept, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=1e-6)


def test_greedy_keeps_the_leading_run_and_adds_the_targets_token():
    logits = torch.eye(5)[[3, 1, 4, 0]]  # the target wants 3, 1, 4, 0
    assert Greedy().verify(torch.tensor([3, 1, 2]), logits) == (2, 4)
    assert Greedy().verify(torch.tensor([3, 1, 4]), logits) == (3, 0)
    assert Greedy().verify(torch.tensor([0, 1, 4]), logits) == (0, 3)
    assert leading_run(torch.tensor([True, True, False, True])) == 2


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match="sampling needs"):
        Sampled(0, CPU, **settings)
