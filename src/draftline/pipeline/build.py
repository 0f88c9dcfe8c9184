"""Build one worker's part on its own device, stream and thread, inside the gate: allocate, warm, prove, capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from draftline import optim
from draftline.compiling.graphs import CapturedStep, LaunchedStep, Step
from draftline.compiling.isolate import compile_isolated
from draftline.compiling.proof import (
    FLASH_BACKWARD,
    FLASH_FORWARD,
    FLEX_BACKWARD,
    FLEX_FORWARD,
    SDPA,
    Expectation,
    prove,
)
from draftline.data.transfer import DeviceRow
from draftline.drafter.float8 import set_linears
from draftline.drafter.model import Drafter, drafter_of
from draftline.drafter.step import AccumulatingStep, Backend, Compile, DrafterStep
from draftline.optim import FlatParameters, ShardedAdamW
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.job import Job, forward_of
from draftline.pipeline.reduce import Member
from draftline.pipeline.state import ShardState, TrainingState, cut_shard
from draftline.target.forward import TappedForward
from draftline.target.states import TargetStates

T = TypeVar("T")
RECOMPUTE = {"ban_recompute_used_far_apart": False, "ban_recompute_materialized_backward": False}
"""Settings of the compiler's choice of what forward saves: elementwise results are computed again in backward instead
(measured on the 8B shape: 1.4 GiB less for 0.8 % of the time)."""
KERNELS_OF: dict[Backend, tuple[str, ...]] = {
    "flex": (FLEX_FORWARD, FLEX_BACKWARD),
    "flash": (FLASH_FORWARD, FLASH_BACKWARD),
}
"""What a captured step runs once a layer; every other attention kernel must not run at all."""
ATTENTION_KERNELS = (FLEX_FORWARD, FLEX_BACKWARD, FLASH_FORWARD, FLASH_BACKWARD, SDPA)
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

    step: AccumulatingStep
    row: DeviceRow
    states: TargetStates
    member: Member
    notes: tuple[str, ...]

    def shard_state(self, steps_done: int, index: int) -> ShardState:
        """Copy this drafter's shard of masters and moments to the host."""
        self.member.await_update()
        return ShardState(steps_done, index, self.member.parameters.layout, self.member.optimizer.state())

    def weights(self) -> dict[str, Tensor]:
        """The compute weights by name, copied to the host."""
        self.member.await_update()
        parameters = self.member.parameters
        views = parameters.layout.views(parameters.weights)
        return {name: view.detach().to("cpu", copy=True) for name, view in views.items()}


def build_target(job: Job, replicas: Replicas, place: Place, name: str) -> BuiltTarget:
    """The tapped forward of one worker, warmed on the first row of the run."""
    forward = forward_of(job, replicas.model(place.device))
    captured = place.stream is not None and job.form == "packed"
    compiled = captured and forward.packing.kernel != "mask"
    if compiled:
        forward.compile_layers(lambda function: compile_isolated(function, name))
    forward.load(job.source.row(job.schedule.first_row))
    step = _finish(forward.run, [forward], place, captured=captured)
    how = ("layers compiled, " if compiled else "") + ("one CUDA graph" if captured else "launched")
    kernel = " by FlashAttention 4" if job.form == "packed" and forward.packing.kernel == "flash" else ""
    return BuiltTarget(forward, step, (f"{name}: target forward {job.form}{kernel}, {how}",))


def build_drafter(
    job: Job, replicas: Replicas, place: Place, name: str, index: int, shared: TargetStates | None
) -> BuiltDrafter:
    """One drafter: weights, optimizer shard, step. `shared` is what a colocated target writes to.

    Raises:
        AttentionFallbackError: the attention that ran in a warm step is not the one that was promised.
        ConfigError: float8 was asked for and torchao cannot be imported.
    """
    captured = place.stream is not None
    compile_function: Compile | None = (
        (lambda function: compile_isolated(function, name)) if captured else None
    )
    drafter = drafter_of(job.spec, _first_weights(job, replicas))
    num_float8 = set_linears(drafter, job.plan.linears)
    parameters, optimizer = _trained(job, drafter, place, index, compile_function)
    spec, head = job.spec, replicas.head(place.device)
    states = shared or TargetStates.zeros(
        job.shape.token_budget, spec.num_taps, job.shape.block_budget, spec.hidden_size, head
    )
    row = DeviceRow(job.source.row(job.schedule.first_row), place.device)
    step = DrafterStep(
        drafter,
        parameters,
        head.to(job.plan.drafter_dtype),
        row,
        states,
        job.plan.backend,
        job.loss.chunk_rows,
        compile_function,
    )
    notes = _prove(job, step, place, name) if captured else ()
    if num_float8:
        notes += (f"{name}: {num_float8} linear maps multiply in {job.plan.linears}",)
    finished = _accumulating(job, step, place, compile_function)
    place.settle()
    update_place = Place.on(place.device)
    with update_place.entered(), optimizer.withheld():
        update = _finish(optimizer.update, [optimizer], update_place, captured=captured)
    step.stats.zero_()  # the warm steps left theirs
    marks = torch.zeros(job.schedule.rows_per_step, device=place.device)
    square_sum = torch.zeros((), device=place.device)
    member = Member(parameters, optimizer, update, step.stats, square_sum, marks, update_place)
    return BuiltDrafter(finished, row, states, member, notes)


def _first_weights(job: Job, replicas: Replicas) -> Mapping[str, Tensor]:
    """Weights that this process begins with, float32 on the host: a resumed run's masters, given ones, or new ones."""
    if job.resumed is not None:
        return TrainingState(job.schedule.first_step, job.resumed).weights()
    return job.initial or replicas.initial_weights(job.spec, job.seed)


def _trained(
    job: Job, drafter: Drafter, place: Place, index: int, compile_function: Compile | None
) -> tuple[FlatParameters, ShardedAdamW]:
    """The flat weights of one drafter and the optimizer of its shard, as a resumed run left it or new."""
    num_drafters, dtype = len(job.plan.drafters), job.plan.drafter_dtype
    gradient_dtype = torch.float32 if job.schedule.rows_per_drafter > 1 else dtype
    parameters = FlatParameters(drafter, num_drafters, dtype, gradient_dtype, place.device)
    optimizer = ShardedAdamW(parameters, index, num_drafters, job.optim, compile_function)
    parameters.release_initial()
    if job.resumed is not None:
        optimizer.load_state(cut_shard(job.resumed, parameters.layout, index, num_drafters))
    return parameters, optimizer


def _accumulating(
    job: Job, step: DrafterStep, place: Place, compile_function: Compile | None
) -> AccumulatingStep:
    """`step` and what becomes of its gradients; on CUDA one graph each, which meet at the gradients' addresses."""
    parameters = step.parameters
    if compile_function is None:
        return AccumulatingStep(LaunchedStep(step.run), parameters.write, parameters.accumulate)
    row = _captured(step.run, [step], place)
    write = _captured(lambda: parameters.write(row.output), [row, parameters], place)
    if job.schedule.rows_per_drafter == 1:
        return AccumulatingStep(row, lambda _: write.replay(), _never)
    add_each = compile_function(optim.add_each)
    add = _captured(lambda: add_each(parameters.gradient_views, row.output), [row, parameters], place)
    return AccumulatingStep(row, lambda _: write.replay(), lambda _: add.replay())


def _never(_: object) -> None:
    raise AssertionError("a second row in a step of one row a drafter")


def _prove(job: Job, step: DrafterStep, place: Place, name: str) -> tuple[str, ...]:
    values: tuple[str, ...] = ()
    if step.backend == "flash":
        values = (f"{name}: FlashAttention 4 {_closeness(step.prove_flash())}",)
    with functorch_config.patch(RECOMPUTE):
        for _ in range(NUM_WARM_STEPS):
            step.run()
    layers = job.spec.num_layers
    kernels = dict.fromkeys(ATTENTION_KERNELS, 0) | dict.fromkeys(KERNELS_OF[step.backend], layers)
    proof = prove(step.run, expect=Expectation(counts=kernels), device=place.device)
    return (
        *values,
        f"{name}: proved {layers} + {layers} block-sparse attention kernels, 0 dense calls, 0 compilations",
        f"{name}: peak memory {(proof.peak_memory_bytes or 0) / 2**30:.1f} GiB",
    )


def _closeness(distance: float | None) -> str:
    if distance is None:
        return "was not compared with dense attention: the run's first row has no block"
    return f"within {distance:.1e} of dense float32 attention, gradients too"


def _finish(function: Callable[[], T], owners: Sequence[object], place: Place, *, captured: bool) -> Step[T]:
    return _captured(function, owners, place) if captured else LaunchedStep(function)


def _captured(function: Callable[[], T], owners: Sequence[object], place: Place) -> CapturedStep[T]:
    assert place.stream is not None
    for _ in range(NUM_WARM_STEPS):
        function()
    place.settle()
    return CapturedStep(function, owners=owners, stream=place.stream)
