"""Preallocated caches: the same tokens in the same steps as growing ones, prompt after prompt."""

from __future__ import annotations

import pytest
import torch

from draftline.console import Screen
from draftline.decoding import caches
from draftline.decoding.advice import time_steps
from draftline.decoding.caches import choose_caches
from draftline.decoding.decode import decode
from draftline.decoding.evaluate import Prompt, compare, reference_answers
from draftline.decoding.fixed import FixedDecoding, FixedTarget
from draftline.decoding.greedy import CachedTarget, Limit, greedy
from draftline.decoding.measure import measure
from draftline.decoding.sampling import Sampled
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.target.load import Target
from tests.oracles.targets import random_prompts, random_target, taught_drafter

ATTENDING = ("qwen3", "llama", "gemma3")
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
LIMIT = Limit(24)


@pytest.mark.parametrize("family", ATTENDING)
@pytest.mark.parametrize("layers", [{}, SLIDING, {**SLIDING, "is_causal": False}], ids=str)
def test_the_same_steps_as_with_growing_caches_prompt_after_prompt(family, layers):
    target = random_target(family, dtype=torch.float64)
    drafter = taught_drafter(target, **layers)
    fixed, kept = FixedDecoding(target, drafter, 64), 0

    for prompt in random_prompts(4):
        ours = decode(target, drafter, prompt, LIMIT, fixed=fixed)
        growing = decode(target, drafter, prompt, LIMIT)
        assert (ours.tokens, ours.produced, ours.accepted) == (
            growing.tokens,
            growing.produced,
            growing.accepted,
        )
        kept += sum(ours.accepted)

    assert kept > 0


@pytest.mark.parametrize("family", ATTENDING)
def test_plain_decoding_writes_the_same_answer(family):
    target = random_target(family, dtype=torch.float64)
    fixed = FixedDecoding(target, taught_drafter(target), 64)
    for prompt in random_prompts(3):
        fixed.reset()
        assert greedy(target, prompt, LIMIT, fixed.verifier) == greedy(target, prompt, LIMIT)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_every_pass_gives_the_logits_and_taps_of_a_growing_cache_also_after_rejections(size):
    target = random_target("gemma3", dtype=torch.float64)
    fixed, growing = FixedTarget(target, (1, 3), 64, (1, 4)), CachedTarget(target, (1, 3))
    text = torch.randint(0, 10, (3, size), generator=torch.Generator().manual_seed(0))

    with torch.inference_mode():
        for part in text:
            ours, theirs = (sequence.feed(part, size) for sequence in (fixed, growing))
            assert torch.allclose(ours.logits, theirs.logits)
            assert size == 1 or torch.allclose(ours.taps, theirs.taps)
            for sequence in (fixed, growing):
                sequence.take_back(size // 2)


def test_an_answer_may_fill_the_capacity_to_its_last_token():
    target = random_target()
    drafter = taught_drafter(target)
    prompt = random_prompts(1)[0]
    fixed = FixedDecoding(target, drafter, len(prompt) + 24)
    assert (
        decode(target, drafter, prompt, LIMIT, fixed=fixed).tokens
        == decode(target, drafter, prompt, LIMIT).tokens
    )


def test_sampling_draws_the_same_tokens():
    target = random_target(dtype=torch.float64)
    drafter = taught_drafter(target)
    fixed, cpu = FixedDecoding(target, drafter, 64), torch.device("cpu")
    answers = [
        decode(target, drafter, [1, 2, 3], LIMIT, Sampled(5, cpu, temperature=2.0), each).tokens
        for each in (None, fixed)
    ]
    assert answers[0] == answers[1]


def test_a_target_with_a_running_state_is_refused():
    target = random_target("hybrid")
    with pytest.raises(ConfigError, match="keeps a running state"):
        FixedDecoding(target, taught_drafter(target), 64)


def test_a_model_that_makes_something_else_of_the_mask_is_refused():
    target = random_target()
    target.model.set_attn_implementation("eager")  # it adds the mask to the scores: True is 1, not "seen"
    with pytest.raises(ConfigError, match="other logits with a fixed cache"):
        FixedTarget(target, (1, 3), 64, (1, 4))


def test_a_model_whose_logits_are_not_finite_with_a_fixed_cache_is_refused(monkeypatch):
    run = FixedTarget.run

    def broken(*given, **rest):
        fed = run(*given, **rest)
        return fed._replace(logits=fed.logits * torch.nan)

    monkeypatch.setattr(FixedTarget, "run", broken)
    with pytest.raises(ConfigError, match="other logits with a fixed cache than with a growing one: nan of"):
        FixedTarget(random_target(), (1, 3), 64, (1, 4))


def test_both_sides_of_a_comparison_use_them_and_nothing_changes():
    target = random_target()
    drafter = taught_drafter(target)
    prompts = [Prompt(tuple(prompt)) for prompt in random_prompts(3)]
    fixed = FixedDecoding(target, drafter, 64)

    found = compare(target, drafter, prompts, LIMIT, fixed)

    assert found.identical == found.prompts == 3
    assert found.tau == compare(target, drafter, prompts, LIMIT).tau


def test_steps_are_timed_with_them():
    target = random_target()
    fixed = FixedDecoding(target, taught_drafter(target), 64, sizes=(2, 4))
    assert list(time_steps(target, [1, 2, 3], 4, 1.0, fixed.verifier).verify_ms) == [1, 2, 4]
    assert fixed.verifier.length == 3


def test_auto_is_growing_on_a_cpu():
    target = random_target()
    drafter, prompts, screen = taught_drafter(target), [Prompt((1, 2, 3))], Screen(quiet=True)
    assert choose_caches("auto", target, drafter, prompts, LIMIT, screen) is None
    assert choose_caches("fixed", target, drafter, prompts, LIMIT, screen) is not None


def on_cuda(family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Drafter]:
    """A target that says it lies on a GPU, and its drafter; nothing else of them does."""
    target = random_target(family)
    drafter = taught_drafter(target)
    monkeypatch.setattr(Target, "device", torch.device("cuda", 0))
    return target, drafter


def test_auto_on_a_gpu_is_growing_and_says_so_where_a_target_keeps_a_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given = *on_cuda("hybrid", monkeypatch), [Prompt((1, 2, 3))], LIMIT, Screen()
    assert choose_caches("auto", *given) is None
    assert "keeps a running state: speeds are measured with growing caches" in words(capsys)
    with pytest.raises(ConfigError, match="running state"):
        choose_caches("fixed", *given)


def test_auto_on_a_gpu_says_why_a_target_cannot_have_fixed_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise ConfigError("other logits this way")

    given = *on_cuda("qwen3", monkeypatch), [Prompt((1, 2, 3))], LIMIT, Screen()
    monkeypatch.setattr(caches, "FixedDecoding", refuse)
    assert choose_caches("auto", *given) is None
    assert "speeds are measured with growing caches, without graphs: other logits this way" in words(capsys)
    with pytest.raises(ConfigError, match="other logits"):
        choose_caches("fixed", *given)


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on the screen, without its line breaks."""
    return " ".join(capsys.readouterr().err.split())


def test_a_measurement_says_which_caches_it_used():
    target = random_target()
    drafter = taught_drafter(target)
    answers = reference_answers(target, [Prompt(tuple(prompt)) for prompt in random_prompts(2)], LIMIT)
    found = [measure(target, drafter, answers, LIMIT, 2, wanted) for wanted in ("auto", "growing", "fixed")]
    assert [each.caches for each in found] == ["growing", "growing", "fixed"]
    assert found[0].evaluation == found[2].evaluation
    assert all(each.decoding is not None and each.decoding.identical == 2 for each in found)
