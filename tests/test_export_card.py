"""What the README of a drafter and the advice about it say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftline.acceptance import Walk, acceptance
from draftline.advice import predict_speedups, warnings
from draftline.card import model_card, serve_lines
from draftline.evaluate import Comparison, Evaluation
from tests.oracles.targets import random_target
from tests.oracles.tiny import tiny_spec

ACCEPTANCE = acceptance([Walk((4, 3), (3, 2)), Walk((2, 1, 1), (1, 0, 0))], slots=3)
EVALUATION = Evaluation(ACCEPTANCE, {"math": ACCEPTANCE}, tau_by_drafts=(1.6, 1.9, 2.2))
COMPARISON = Comparison(
    prompts=2,
    identical=2,
    tokens=13,
    tau=2.2,
    plain_tokens_per_s=50.0,
    speculative_tokens_per_s=90.0,
    speedup=1.8,
    draft_ms=4.0,
    verify_ms=20.0,
)


def test_serve_lines_carry_the_trained_block_size():
    lines = serve_lines(tiny_spec(), "owner/target", "me/drafter")

    assert lines["SGLang"].endswith("--speculative-num-draft-tokens 4")
    assert '"num_speculative_tokens": 3' in lines["vLLM"]
    assert all("owner/target" in line and "me/drafter" in line for line in lines.values())


def test_a_card_shows_what_was_measured_and_admits_what_was_not():
    measured = model_card(tiny_spec(), "owner/target", "me/drafter", EVALUATION, COMPARISON)
    silent = model_card(tiny_spec(), "owner/target", "me/drafter")

    assert f"| math | {ACCEPTANCE.tau:.2f} |" in measured
    assert "2 of 2 answers equal plain greedy decoding" in measured
    assert "Acceptance was not measured." in silent
    assert "| prompts |" not in silent


def test_a_drafter_that_slows_decoding_is_called_so_with_the_arithmetic():
    slow = replace(COMPARISON, speedup=0.8, verify_ms=60.0)
    assert "a step costs 3.2 plain tokens and gives 2.20" in warnings(EVALUATION, slow)[0]


def test_different_answers_and_too_few_steps_are_pointed_out():
    found = warnings(EVALUATION, replace(COMPARISON, identical=1))
    assert any("1 of 2 answers differ" in text for text in found)
    assert any("tau rests on 5 verify steps" in text for text in found)


def test_a_good_drafter_measured_well_draws_no_warning():
    many = replace(EVALUATION, overall=replace(ACCEPTANCE, verify_steps=2000))
    assert warnings(many, COMPARISON) == ()


def test_predictions_cover_shorter_blocks_with_their_own_tau():
    predicted = predict_speedups(random_target(), EVALUATION, COMPARISON, [1, 2, 3])

    assert [(p.block_size, p.tau) for p in predicted] == [(2, 1.6), (4, 2.2)]
    assert all(p.speedup > 0 for p in predicted)


@pytest.mark.parametrize("slots", [7, 15])
def test_the_trained_block_is_always_among_the_predictions(slots):
    evaluation = replace(EVALUATION, tau_by_drafts=tuple(1 + k / 10 for k in range(slots)))
    predicted = predict_speedups(random_target(), evaluation, COMPARISON, [1, 2])
    assert predicted[-1].block_size == slots + 1
