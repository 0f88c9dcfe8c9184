"""The control: a drafter that is trained on taps of zeros must not learn what only the target can know.

If it did, its labels or the text behind the anchor would reach it by another way, and its figures would be worth
nothing at inference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.config import DeadlineConfig, DrafterConfig, LossConfig, OptimConfig, TargetConfig
from draftline.data.prepare import prepare
from draftline.data.rows import RowShape, RowSource
from draftline.data.store import TokenStore, open_store
from draftline.drafter.stats import StepStats, read_stats
from draftline.drafter.worker import StepRecord
from draftline.embedded import train_conversations
from draftline.pipeline.engine import Engine
from draftline.pipeline.job import Job, max_documents
from draftline.pipeline.plan import Plan
from draftline.pipeline.schedule import Schedule
from draftline.target.forward import decoder_layers, share_weights
from draftline.target.inspect import resolve_spec
from draftline.target.load import Target, load_target

CPU = torch.device("cpu")
STEPS, BLOCK = 150, 8
SHAPE = RowShape(256, 64, BLOCK, 64, 4.0, ())


def job(target: Target, store: TokenStore) -> Job:
    """The demo's drafter on the embedded target, one worker, a few steps."""
    wanted = DrafterConfig(num_layers=2, block_size=BLOCK, num_taps=3, intermediate_size=256)
    return Job(
        spec=resolve_spec(wanted, target.model.config, target.tokenizer, target.head.shape[0], scale=1.0),
        plan=Plan("colocated", (CPU,), (CPU,), "sdpa", torch.float32, "drafter_dtype", 2, 1),
        schedule=Schedule(STEPS, rows_per_step=2, num_targets=1, num_drafters=1),
        shape=SHAPE,
        source=RowSource(store, SHAPE, seed=0),
        target=target,
        form="packed",
        max_documents=max_documents(torch.from_numpy(store.lengths), SHAPE.token_budget),
        optim=OptimConfig(steps=STEPS, lr=6e-3),
        loss=LossConfig(),
        deadlines=DeadlineConfig(),
        boundaries=frozenset(),
        seed=0,
    )


def blinded(target: Target) -> Target:
    """The target with nothing but zeros at every layer's output."""
    model = share_weights(target.model)

    def silence(_module: Any, _inputs: Any, output: Any) -> torch.Tensor:
        return torch.zeros_like(output[0] if isinstance(output, tuple) else output)

    for layer in decoder_layers(model)[2]:
        layer.register_forward_hook(silence)
    return replace(target, model=model)


def last_steps(run: Job) -> list[StepStats]:
    events = Engine(run).events()
    return [read_stats(event.stats, BLOCK) for event in events if isinstance(event, StepRecord)][-20:]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drafter_trained_without_taps_stays_near_an_acceptance_of_one(tmp_path: Path):
    target = load_target(TargetConfig(path="builtin:tiny"), CPU)
    prepare(train_conversations(demo=True), target.tokenizer, tmp_path / "store")
    store = open_store(tmp_path / "store")
    seeing, blind = last_steps(job(target, store)), last_steps(job(blinded(target), store))
    drafts = [mean([step.accept_anchor_mean for step in steps]) - 1 for steps in (seeing, blind)]
    assert drafts[0] > 1.2
    assert drafts[1] < 0.8  # what the anchor's token alone gives away: its text has set phrases
    assert mean([step.loss for step in blind]) > 1.5 * mean([step.loss for step in seeing])
