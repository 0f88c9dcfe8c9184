"""Speculative decoding: the target's own text, and steps that equal the replay's."""

from __future__ import annotations

import pytest
import torch

from draftline.decoding.decode import Prefilled, Verified, decode, decode_events
from draftline.decoding.evaluate import Prompt, Reference, replay
from draftline.decoding.greedy import Limit, greedy, greedy_batch
from draftline.errors import DataError
from tests.oracles.targets import FAMILIES, fitting_drafter, random_prompts, random_target, taught_drafter

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_the_targets_own_greedy_output(family):
    target = random_target(family, dtype=torch.float64)
    drafter = taught_drafter(target)
    limit = Limit(24, frozenset({3}))

    for prompt in random_prompts(3):
        assert list(decode(target, drafter, prompt, limit).tokens) == greedy(target, prompt, limit)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_a_cache_equals_greedy_without_one(family):
    target = random_target(family, dtype=torch.float64)
    prompt = random_prompts(1, seed=4)[0]

    tokens = list(prompt)
    for _ in range(10):
        logits = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))

    assert greedy(target, prompt, Limit(10)) == tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_gives_what_each_gives_alone(family):
    target = random_target(family, dtype=torch.float64)
    prompts, limit = random_prompts(5), Limit(10, frozenset({3}))

    assert greedy_batch(target, prompts, limit, 3) == [greedy(target, prompt, limit) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [{}, SLIDING, {**SLIDING, "is_causal": False}], ids=str)
def test_replay_takes_the_steps_of_the_decoder(family, layers):
    target = random_target(family, dtype=torch.float64)
    drafter = taught_drafter(target, **layers)
    limit, kept = Limit(24), 0

    for prompt in random_prompts(3):
        decoded = decode(target, drafter, prompt, limit)
        walk = replay(target, drafter, Reference(Prompt(tuple(prompt)), decoded.tokens))
        assert (walk.produced, walk.accepted) == (decoded.produced, decoded.accepted)
        kept += sum(decoded.accepted)

    assert kept > 0, "without an accepted draft the walk proves nothing"


def test_events_tell_what_was_drafted_kept_and_added():
    target = random_target()
    drafter = fitting_drafter(target)
    prompt = random_prompts(1)[0]

    first, *steps = decode_events(target, drafter, prompt, Limit(30))

    assert isinstance(first, Prefilled)
    answer = [first.token]
    for step in steps:
        assert isinstance(step, Verified)
        assert len(step.drafted) == drafter.spec.block_size - 1
        assert step.produced[: step.accepted] == step.drafted[: step.accepted]
        answer.extend(step.produced)
    assert answer == greedy(target, prompt, Limit(30))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_the_answer_never_exceeds_the_limit(max_new_tokens):
    target = random_target()
    decoded = decode(target, fitting_drafter(target), [1, 2, 3], Limit(max_new_tokens))

    assert len(decoded.tokens) == max_new_tokens
    assert sum(decoded.produced) == max_new_tokens - 1


def test_nothing_follows_a_stop_token():
    target = random_target()
    drafter = fitting_drafter(target)
    answer = greedy(target, [1, 2, 3], Limit(30))
    stop = answer[4]

    decoded = decode(target, drafter, [1, 2, 3], Limit(30, frozenset({stop})))

    assert list(decoded.tokens) == answer[: answer.index(stop) + 1]


def test_an_empty_prompt_is_refused():
    target = random_target()
    with pytest.raises(DataError, match="holds no token"):
        decode(target, fitting_drafter(target), [], Limit(5))
