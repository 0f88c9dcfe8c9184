"""What a training run consists of, resolved: plain records that the engine's workers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.config import DeadlineConfig, DrafterSpec, LossConfig, OptimConfig, RunConfig
from draftline.data.rows import RowShape, RowSource
from draftline.drafter.step import Backend, distinct_windows
from draftline.pipeline.plan import Plan
from draftline.pipeline.schedule import Schedule
from draftline.target.forward import Form, TappedForward
from draftline.target.load import Target
from draftline.target.states import BlockTokens

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
"""Paper, section 5."""


@dataclass(frozen=True)
class Job:
    """Everything that workers need to know; nothing in it changes while they run."""

    spec: DrafterSpec
    plan: Plan
    schedule: Schedule
    shape: RowShape
    source: RowSource
    target: Target
    form: Form
    max_documents: int
    """Most documents that one row can hold."""
    optim: OptimConfig
    loss: LossConfig
    deadlines: DeadlineConfig
    boundaries: frozenset[int]
    """Multiples: after step s the state is taken when s + 1 is a multiple of one of them."""
    seed: int
    initial: Mapping[str, Tensor] | None = None
    """Weights to start from, by name; None draws them from the seed."""
    resumed: Mapping[str, Tensor] | None = None
    """State by `KIND.NAME` as `TrainingState` holds it, when a checkpoint is resumed."""

    def is_boundary(self, step: int) -> bool:
        """Whether the state is taken after step `step`."""
        done = step + 1
        return done == self.schedule.num_steps or any(done % every == 0 for every in self.boundaries)


def forward_of(job: Job, model: PreTrainedModel) -> TappedForward:
    """The forward of a run's rows, over its target's weights on any device."""
    return TappedForward(
        model,
        job.spec.target_layer_ids,
        job.shape.token_budget,
        job.max_documents,
        job.form,
        blocks=BlockTokens(job.shape.block_budget, job.spec.mask_token_id),
        flash=job.plan.backend == "flash",
    )


def decay_gamma(loss: LossConfig, block_size: int) -> float:
    """Slots: the given decay, or the paper's for this block size."""
    return loss.decay_gamma or GAMMA_BY_BLOCK_SIZE.get(block_size, block_size / 2)


def row_shape(config: RunConfig, spec: DrafterSpec, backend: Backend) -> RowShape:
    """The rows of a run; dense attention reads no tables."""
    return RowShape(
        token_budget=config.rows.token_budget,
        block_budget=config.rows.block_budget,
        block_size=spec.block_size,
        anchors_per_document=config.rows.anchors_per_document,
        decay_gamma=decay_gamma(config.loss, spec.block_size),
        windows=distinct_windows(spec) if backend != "sdpa" else (),
    )


def max_documents(source_lengths: Tensor, token_budget: int) -> int:
    """Most documents that fit a row when none appears in it twice: the shortest ones together."""
    shortest, _ = torch.sort(source_lengths)
    total = torch.cumsum(shortest[:token_budget].long(), dim=0)
    return max(1, int((total <= token_budget).sum()))
