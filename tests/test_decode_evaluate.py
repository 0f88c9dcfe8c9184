"""What an evaluation says, on walks small enough to check by hand and on a real drafter."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from draftline.decoding.acceptance import Walk, acceptance, walk
from draftline.decoding.evaluate import Prompt, compare, evaluate, reference_answers
from draftline.decoding.evaluator import Evaluator
from draftline.decoding.greedy import CachedTarget, Limit, greedy
from draftline.drafter.draft import BlockDrafter
from draftline.errors import ConfigError, DataError
from draftline.metrics import eval_metrics
from tests.oracles.targets import random_prompts, random_target, taught_drafter
from tests.pipeline_fixtures import SPEC, tiny_target


def test_the_walk_jumps_by_what_was_kept_and_cuts_the_last_block():
    # answer of 8 tokens: runs at its first 7; steps start at tokens 0, 3, 4 and 6
    assert walk([2, 9, 9, 0, 1, 9, 3]) == Walk(produced=(3, 1, 2, 1), accepted=(2, 0, 1, 1))


def test_an_answer_of_one_token_has_no_step():
    assert walk([]) == Walk((), ())


def test_tau_is_pooled_and_the_macro_mean_is_not():
    measured = acceptance([Walk((4, 4), (3, 3)), Walk((1, 1, 1, 1), (0, 0, 0, 0))], slots=3)

    assert measured.tau == 12 / 6
    assert measured.tau_macro == (4 + 1) / 2
    assert measured.accept_pos == (2 / 6, 2 / 6, 2 / 6)
    assert (measured.verify_steps, measured.tokens, measured.prompts) == (6, 12, 2)


def test_positions_count_steps_that_kept_at_least_so_many():
    measured = acceptance([Walk((1, 2, 4), (0, 1, 3))], slots=3)
    assert measured.accept_pos == (2 / 3, 1 / 3, 1 / 3)


def test_the_interval_holds_tau_shrinks_with_prompts_and_is_seeded():
    few = acceptance([Walk((steps,), (steps - 1,)) for steps in (1, 2, 3, 4)], slots=3)
    many = acceptance([Walk((steps,), (steps - 1,)) for steps in (1, 2, 3, 4)] * 50, slots=3)

    assert few.tau_low < few.tau < few.tau_high
    assert many.tau_high - many.tau_low < 0.3 * (few.tau_high - few.tau_low)
    assert few == acceptance([Walk((steps,), (steps - 1,)) for steps in (1, 2, 3, 4)], slots=3)


def test_answers_too_short_to_measure_are_refused():
    with pytest.raises(DataError, match="no answer has two tokens"):
        acceptance([Walk((), ())], slots=3)


@pytest.fixture(scope="module")
def taught():
    target = random_target()
    drafter = taught_drafter(target)
    prompts = [
        Prompt(tuple(prompt), slices)
        for prompt, slices in zip(random_prompts(3), [("a",), ("a", "mode/tools"), ("b",)], strict=True)
    ]
    return target, drafter, prompts


def test_every_slice_pools_the_steps_of_its_prompts(taught):
    target, drafter, prompts = taught

    evaluation = evaluate(target, drafter, reference_answers(target, prompts, Limit(24)))
    slices = evaluation.slices

    assert sorted(slices) == ["a", "b", "mode/tools"]
    assert slices["a"].verify_steps + slices["b"].verify_steps == evaluation.overall.verify_steps
    assert slices["a"].tokens + slices["b"].tokens == evaluation.overall.tokens
    assert (slices["a"].prompts, slices["b"].prompts, slices["mode/tools"].prompts) == (2, 1, 1)
    assert evaluation.overall.tau > 1.2
    assert evaluation.tau_by_drafts[-1] == evaluation.overall.tau
    assert list(evaluation.tau_by_drafts) == sorted(evaluation.tau_by_drafts)
    assert json.loads(json.dumps(asdict(evaluation)))["overall"]["tau"] == evaluation.overall.tau


@torch.inference_mode()
def test_cross_entropy_is_of_every_draft_that_has_a_token_to_equal(taught):
    target, drafter, prompts = taught
    reference = reference_answers(target, prompts[:1], Limit(24))[0]
    text = [*reference.prompt.input_ids, *reference.answer]

    losses = []
    for anchor in range(len(reference.prompt.input_ids), len(text) - 1):
        block = BlockDrafter(drafter, target.embedding, target.head, anchor)
        block.observe(CachedTarget(target, (1, 3)).feed(torch.tensor(text[:anchor]), num_logits=1).taps)
        labels = torch.tensor(text[anchor + 1 : anchor + drafter.spec.block_size])
        logits = block.logits(text[anchor])[: len(labels)]
        losses += (-logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]).tolist()

    assert evaluate(target, drafter, [reference]).ce == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_later_turn_is_asked_after_the_targets_own_answer():
    target = random_target()
    seen = []

    def go_on(answer):
        seen.append(tuple(answer))
        return Prompt((1, 2, *answer, 3), ("second",))

    references = reference_answers(target, [Prompt((1, 2), ("first",), go_on), Prompt((4,))], Limit(6))

    assert [reference.prompt.slices for reference in references] == [("first",), ("all",), ("second",)]
    assert seen == [references[0].answer]
    assert references[2].prompt.input_ids == (1, 2, *references[0].answer, 3)
    assert list(references[2].answer) == greedy(target, references[2].prompt.input_ids, Limit(6))


def test_the_real_decoder_agrees_with_replay_and_with_plain_greedy(taught):
    target, drafter, prompts = taught

    replayed = evaluate(target, drafter, reference_answers(target, prompts, Limit(24))).overall
    decoded = compare(target, drafter, prompts, Limit(24))

    assert decoded.identical == decoded.prompts == 3
    assert decoded.tau == replayed.tau
    assert decoded.speedup > 0
    assert decoded.plain_tokens_per_s > 0


def test_comparing_nothing_is_refused(taught):
    target, drafter, _ = taught
    with pytest.raises(DataError, match="no prompt to compare"):
        compare(target, drafter, [], Limit(4))


def test_metrics_carry_the_names_that_training_and_evaluate_share(taught):
    target, drafter, prompts = taught
    evaluation = evaluate(target, drafter, reference_answers(target, prompts, Limit(24)))

    metrics = eval_metrics(evaluation, accept_anchor_mean=3.0)

    assert metrics["eval/tau"] == evaluation.overall.tau
    assert metrics["eval/tau/mode/tools"] == evaluation.slices["mode/tools"].tau
    assert metrics["eval/tau_macro/b"] == evaluation.slices["b"].tau_macro
    assert metrics["eval/tau_train_gap"] == 3.0 - evaluation.overall.tau
    assert [metrics[f"eval/accept_pos/{k:02d}"] for k in (1, 2, 3)] == list(evaluation.overall.accept_pos)
    kept = [metrics[f"eval/accept_len_hist/{k:02d}"] for k in range(4)]
    assert sum(kept) == pytest.approx(1)
    assert kept[3] == evaluation.overall.accept_pos[2]
    assert "eval/tau_train_gap" not in eval_metrics(evaluation)


@pytest.mark.parametrize(
    ("tokens", "max_new_tokens", "error", "fix"),
    [
        (513, 1, DataError, "shorten it$"),
        (512, 1, DataError, "shorten it$"),
        (500, 13, ConfigError, "shorten it or lower max_new_tokens$"),
    ],
)
def test_a_prompt_that_does_not_fit_the_targets_context_is_refused(tokens, max_new_tokens, error, fix):
    prompts, limit = [Prompt((5,) * 3), Prompt((5,) * tokens)], Limit(max_new_tokens)
    words = rf"prompt 2 of 2 \(all\) has {tokens} tokens.* of {max_new_tokens} .*context of 512 tokens.*{fix}"
    for refuse in (
        lambda: reference_answers(tiny_target(), prompts, limit),
        lambda: Evaluator(tiny_target(), SPEC, prompts, limit),
    ):
        with pytest.raises(error, match=words):
            refuse()


def test_a_prompt_that_just_fits_the_context_is_answered():
    (reference,) = reference_answers(tiny_target(), [Prompt((5,) * 509)], Limit(3))
    assert len(reference.answer) == 3
