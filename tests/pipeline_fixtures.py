"""A small random target, documents in memory, and jobs over them: the real pipeline, only small."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.config import DeadlineConfig, DrafterSpec, LossConfig, OptimConfig
from draftline.data.document import Document
from draftline.data.rows import RowShape, RowSource
from draftline.drafter.worker import StepRecord
from draftline.pipeline.engine import Engine
from draftline.pipeline.job import Job, max_documents
from draftline.pipeline.plan import Plan
from draftline.pipeline.schedule import Schedule
from draftline.pipeline.state import ShardState, TrainingState, join_shards
from draftline.target.load import Target

VOCAB, HIDDEN, BLOCK = 128, 32, 8
SPEC = DrafterSpec(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=512,
    block_size=BLOCK,
    mask_token_id=3,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    layer_types=("full_attention",) * 2,
)


class MemoryStore:
    """Documents in memory: 40 of 20 to 60 tokens with a learnable pattern; the first quarter is the prompt."""

    def __init__(self, num_documents: int = 40) -> None:
        draws = np.random.default_rng(0)
        self._documents = []
        for _ in range(num_documents):
            length, start = int(draws.integers(20, 60)), int(draws.integers(4, VOCAB))
            ids = (start + 3 * np.arange(length)) % (VOCAB - 4) + 4
            supervised = np.arange(length) >= length // 4
            self._documents.append(Document(ids.astype(np.int32), supervised))
        self.lengths = np.array([len(d) for d in self._documents], dtype=np.int32)

    def document(self, index: int) -> Document:
        return self._documents[index]


@cache
def tiny_target() -> Target:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide enough for logits that differ
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(requires_grad=False)
    weight = model.get_input_embeddings().weight.detach()
    return Target("tiny", model, cast("Any", None), weight, 1.0, weight)


def make_job(
    targets: int = 1, drafters: int = 1, steps: int = 4, rows_per_step: int = 6, **changes: Any
) -> Job:
    store = MemoryStore()
    shape = RowShape(256, 32, BLOCK, 512, 4.0, ())
    cpu = torch.device("cpu")
    job = Job(
        spec=SPEC,
        plan=Plan("split", (cpu,) * targets, (cpu,) * drafters, "sdpa", torch.float32, "drafter_dtype", 2, 1),
        schedule=Schedule(steps, rows_per_step, targets, drafters),
        shape=shape,
        source=RowSource(store, shape, seed=0),
        target=tiny_target(),
        form="packed",
        max_documents=max_documents(torch.from_numpy(store.lengths), shape.token_budget),
        optim=OptimConfig(steps=steps, lr=3e-3),
        loss=LossConfig(),
        deadlines=DeadlineConfig(stall_timeout_s=20, startup_timeout_s=60),
        boundaries=frozenset(),
        seed=0,
    )
    return replace(job, **changes)


def colocated(job: Job, workers: int) -> Job:
    cpu = torch.device("cpu")
    plan = replace(job.plan, mode="colocated", targets=(cpu,) * workers, drafters=(cpu,) * workers)
    schedule = replace(job.schedule, num_targets=workers, num_drafters=workers)
    return replace(job, plan=plan, schedule=schedule)


@dataclass(frozen=True)
class Outcome:
    records: list[StepRecord]  # of drafter 0
    states: list[TrainingState]

    @property
    def losses(self) -> list[float]:
        return [float(r.stats[0] / r.stats[1]) for r in self.records]


def run_job(job: Job) -> Outcome:
    records: list[StepRecord] = []
    shards: dict[int, list[ShardState]] = {}
    for event in Engine(job).events():
        if isinstance(event, StepRecord) and event.rows.start % len(job.plan.drafters) == 0:
            records.append(event)
        elif isinstance(event, ShardState):
            shards.setdefault(event.steps_done, []).append(event)
    return Outcome(records, [join_shards(shards[s]) for s in sorted(shards)])
