"""Thousands of tokens of speculative decoding on trained targets, dense and recurrent: every one the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftline.cli import parse_run
from draftline.commands import load_pair
from draftline.config import TargetConfig
from draftline.console import Screen
from draftline.decoding.decode import decode
from draftline.decoding.greedy import Limit
from draftline.decoding.prompts import load_prompts
from draftline.run import train
from tests.test_cli import changed

TOKENS = 90


@torch.inference_mode()
def greedy_choices(target, prompt, answer) -> list[int]:
    """The target's choice at every place of an answer, from one pass without a cache: equal to the answer if and
    only if plain greedy decoding writes it."""
    text = torch.tensor([[*prompt, *answer]])
    return (
        target.model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prompts"), [("tiny", 24), ("hybrid", 12)])
def test_every_token_is_the_targets_own_choice(name: str, prompts: int, tmp_path: Path):
    flags = [*changed(f"--target.path=builtin:{name}"), "--optim.steps=60", "--optim.lr=6e-3"]
    flags = [flag for flag in flags if not flag.startswith(("--data.eval-path", "--evaluation."))]
    trained = train(parse_run([*flags, f"--output={tmp_path / 'run'}"]), Screen(quiet=True))
    target, drafter = load_pair(trained.drafter, TargetConfig(path=f"builtin:{name}"))
    tokens = drafts = kept = 0

    for prompt in load_prompts("builtin:demo", target.tokenizer, prompts):
        decoded = decode(target, drafter, prompt.input_ids, Limit(TOKENS))
        assert list(decoded.tokens) == greedy_choices(target, prompt.input_ids, decoded.tokens)
        tokens += len(decoded.tokens)
        drafts += len(decoded.produced) * (drafter.spec.block_size - 1)
        kept += sum(decoded.accepted)

    assert tokens == prompts * TOKENS > 1000
    assert 100 < kept < drafts - 100, "blocks must be kept whole, in part and not at all to prove anything"
