"""What an evaluation says, on walks small enough to check by hand and on a real drafter."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from draftline.acceptance import Walk, acceptance, walk
from draftline.errors import DataError
from draftline.evaluate import Prompt, compare, evaluate, reference_answers
from draftline.greedy import Limit
from tests.oracles.targets import random_prompts, random_target, taught_drafter


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
    prompts = [Prompt(tuple(prompt), task) for prompt, task in zip(random_prompts(3), "aab", strict=True)]
    return target, drafter, prompts


def test_tasks_partition_the_steps(taught):
    target, drafter, prompts = taught

    evaluation = evaluate(target, drafter, reference_answers(target, prompts, Limit(24)))

    assert sorted(evaluation.tasks) == ["a", "b"]
    assert sum(task.verify_steps for task in evaluation.tasks.values()) == evaluation.overall.verify_steps
    assert sum(task.tokens for task in evaluation.tasks.values()) == evaluation.overall.tokens
    assert evaluation.overall.tau > 1.2
    assert evaluation.tau_by_drafts[-1] == evaluation.overall.tau
    assert list(evaluation.tau_by_drafts) == sorted(evaluation.tau_by_drafts)
    assert json.loads(json.dumps(asdict(evaluation)))["overall"]["tau"] == evaluation.overall.tau


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
