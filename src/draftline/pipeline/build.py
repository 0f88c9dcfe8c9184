"""Build one worker's part on its own device, stream and thread, inside the gate: allocate, warm, prove, capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.compiling.graphs import CapturedStep, LaunchedStep, Step
from draftline.compiling.isolate import compile_isolated
from draftline.compiling.proof import FLEX_BACKWARD, FLEX_FORWARD, SDPA, Expectation, prove
from draftline.data.transfer import DeviceRow
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.optim import FlatParameters, ShardedAdamW
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.job import Job
from draftline.pipeline.reduce import Member
from draftline.pipeline.state import ShardState, cut_shard
from draftline.target.forward import TappedForward

NUM_WARM_STEPS = 2
"""Launched steps before the proof: the first compiles, the second shows that nothing compiles again."""


@dataclass(frozen=True)
class BuiltTarget:
    """A target worker's forward and how to run it."""

    forward: TappedForward
    step: Step[Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class BuiltDrafter:
    """A drafter worker's step, its inputs and its part in the reduction."""

    step: Step[None]
    row: DeviceRow
    taps: Tensor  # [T, K * D]
    member: Member
    notes: tuple[str, ...]

    def shard_state(self, steps_done: int, index: int) -> ShardState:
        """Copy this drafter's shard of masters and moments to the host."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.member.optimizer.state().items()
        }
        return ShardState(steps_done, index, self.member.parameters.layout, tensors)

    def weights(self) -> dict[str, Tensor]:
        """The compute weights by name, copied to the host."""
        parameters = self.member.parameters
        views = parameters.layout.views(parameters.weights)
        return {name: view.detach().to("cpu", copy=True) for name, view in views.items()}


def build_target(job: Job, replicas: Replicas, place: Place, name: str) -> BuiltTarget:
    """The tapped forward of one worker, warmed on the first row of the run."""
    forward = TappedForward(
        replicas.model(place.device),
        job.spec.target_layer_ids,
        job.shape.token_budget,
        job.max_documents,
        job.form,
    )
    captured = place.stream is not None and job.form == "packed"
    compiled = captured and forward.packing.kernel == "varlen"
    if compiled:
        forward.compile_layers(lambda function: compile_isolated(function, name))
    forward.load(job.source.row(job.schedule.first_row))
    step = _finish(forward.run, [forward], place, captured=captured)
    how = ("layers compiled, " if compiled else "") + ("one CUDA graph" if captured else "launched")
    return BuiltTarget(forward, step, (f"{name}: target forward {job.form}, {how}",))


def build_drafter(
    job: Job, replicas: Replicas, place: Place, name: str, index: int, shared_taps: Tensor | None
) -> BuiltDrafter:
    """One drafter: weights, optimizer shard, step. `shared_taps` is a colocated target's output buffer.

    Raises:
        AttentionFallbackError: the attention that ran in a warm step is not the one that was promised.
    """
    num_drafters = len(job.plan.drafters)
    drafter = _initial_drafter(job).to(place.device)
    parameters = FlatParameters(drafter, num_drafters, job.plan.drafter_dtype)
    optimizer = ShardedAdamW(parameters, index, num_drafters, job.optim)
    if job.resumed is not None:
        _resume(job, parameters, optimizer, index, num_drafters)
    embedding, head = replicas.tables(place.device)
    width = job.spec.num_taps * job.spec.hidden_size
    taps = shared_taps
    if taps is None:
        taps = torch.zeros(job.shape.token_budget, width, device=place.device, dtype=embedding.dtype)
    row = DeviceRow(job.source.row(job.schedule.first_row), place.device)
    captured = place.stream is not None
    step = DrafterStep(
        drafter,
        parameters,
        embedding,
        head.to(job.plan.drafter_dtype),
        row,
        taps,
        job.plan.backend,
        job.loss.chunk_rows,
        (lambda function: compile_isolated(function, name)) if captured else None,
    )
    marks = torch.zeros(job.schedule.rows_per_step, device=place.device)
    member = Member(parameters, optimizer, step.stats, torch.zeros((), device=place.device), marks)
    notes = _prove(job, step, place, name) if captured else ()
    finished = _finish(step.run, [step, member], place, captured=captured)
    parameters.gradients.zero_()  # the warm steps left theirs
    member.stats.zero_()
    return BuiltDrafter(finished, row, taps, member, notes)


def _initial_drafter(job: Job) -> Drafter:
    drafter = Drafter(job.spec)
    drafter.init_weights(job.seed)
    if job.initial is not None:
        drafter.load_state_dict(dict(job.initial), strict=True)
    return drafter


def _resume(
    job: Job, parameters: FlatParameters, optimizer: ShardedAdamW, index: int, num_drafters: int
) -> None:
    assert job.resumed is not None
    for name, view in parameters.layout.views(parameters.weights).items():
        view.copy_(job.resumed[f"master.{name}"])
    optimizer.load_state(cut_shard(job.resumed, parameters.layout, index, num_drafters))


def _prove(job: Job, step: DrafterStep, place: Place, name: str) -> tuple[str, ...]:
    for _ in range(NUM_WARM_STEPS):
        step.run()
    layers = job.spec.num_layers
    expectation = Expectation(counts={FLEX_FORWARD: layers, FLEX_BACKWARD: layers, SDPA: 0})
    proof = prove(step.run, expect=expectation, device=place.device)
    return (
        f"{name}: proved {layers} + {layers} block-sparse attention kernels, 0 dense calls, 0 compilations",
        f"{name}: peak memory {(proof.peak_memory_bytes or 0) / 2**30:.1f} GiB",
    )


def _finish(
    function: Callable[[], Tensor] | Callable[[], None],
    owners: Sequence[object],
    place: Place,
    *,
    captured: bool,
) -> Step:
    if not captured:
        return LaunchedStep(function)
    assert place.stream is not None
    for _ in range(NUM_WARM_STEPS):
        function()
    place.settle()
    return CapturedStep(function, owners=owners, stream=place.stream)
