"""Acceptance certified by code that is not ours: transformers' and z-lab's decoders take the same steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftline.decoding.decode import decode
from draftline.decoding.greedy import CachedTarget, Limit, greedy, tapping
from draftline.target.forward import decoder_layers
from tests.oracles.huggingface import assistant, generate
from tests.oracles.targets import FAMILIES, random_prompts, random_target, taught_drafter
from tests.oracles.zlab import dflash_model, zlab_decode, zlab_drafter


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_transformers_takes_as_many_verify_steps_and_writes_the_same_text(family):
    target = random_target(family)
    drafter = taught_drafter(target)
    oracle, limit, kept = assistant(drafter), Limit(24), 0

    for prompt in random_prompts(4):
        theirs = generate(target, prompt, limit, oracle)
        ours = decode(target, drafter, prompt, limit)
        assert theirs.tokens == ours.tokens == tuple(greedy(target, prompt, limit))
        assert theirs.steps == len(ours.produced)
        kept += sum(ours.accepted)

    assert kept > 0


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "is_causal": False},
    ],
    ids=str,
)
def test_zlab_takes_the_very_same_steps(layers):
    target = random_target()
    drafter = taught_drafter(target, **layers)
    oracle, limit = zlab_drafter(drafter), Limit(24)
    # z-lab shortens its blocks near the limit; with a block more to write, the steps before are whole.
    longer = replace(limit, max_new_tokens=limit.max_new_tokens + drafter.spec.block_size)

    for prompt in random_prompts(4):
        ours = decode(target, drafter, prompt, limit)
        text, steps = zlab_decode(oracle, target.model, prompt, longer)
        assert tuple(text[: limit.max_new_tokens]) == ours.tokens
        whole = len(ours.produced) - 1
        assert tuple(steps[:whole]) == ours.produced[:whole]
        assert steps[whole] >= ours.produced[-1]


def test_a_stop_token_ends_all_three_alike():
    target = random_target()
    drafter = taught_drafter(target)
    prompt = random_prompts(1)[0]
    stop = greedy(target, prompt, Limit(24))[-4]
    limit = Limit(60, frozenset({stop}))

    ours = decode(target, drafter, prompt, limit)
    text, steps = zlab_decode(zlab_drafter(drafter), target.model, prompt, limit)
    theirs = generate(target, prompt, limit, assistant(drafter))

    assert tuple(text) == theirs.tokens == ours.tokens
    assert tuple(steps) == ours.produced
    assert theirs.steps == len(ours.produced)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tap_is_the_raw_output_of_its_layer(family):
    target = random_target(family)
    prompt, ids = torch.tensor(random_prompts(1)[0]), (4, 1, 3)

    taps = CachedTarget(target, ids).feed(prompt, num_logits=1).taps
    hidden = target.model(input_ids=prompt[None], output_hidden_states=True, use_cache=False).hidden_states

    expected = dflash_model.extract_context_feature(hidden, list(ids))[0]
    assert torch.allclose(taps, expected, atol=1e-6)


def test_the_last_layers_tap_is_not_the_normed_state_that_transformers_lists():
    target = random_target()
    layers = decoder_layers(target.model)[2]
    with tapping([layers[-1]]) as taps:
        output = target.model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)

    assert not torch.allclose(taps[0], output.hidden_states[-1], atol=1e-3)
    assert torch.allclose(target.model.model.norm(taps[0]), output.hidden_states[-1], atol=1e-6)
