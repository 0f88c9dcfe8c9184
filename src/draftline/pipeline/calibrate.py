"""Both sides of a run timed alone on one device, with random weights in the target's real shape.

Nothing of the target but its configuration is read. The workers are built as in a run: compiled, proved and
captured on CUDA; then rows are replayed and timed, each side by itself.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from draftline.compiling import gate
from draftline.compiling.proof import prepare_profiler
from draftline.config import DeadlineConfig, DrafterSpec, LossConfig, OptimConfig, TargetConfig
from draftline.data.document import DocumentStore
from draftline.data.rows import RowShape, RowSource
from draftline.errors import StallError
from draftline.pipeline.build import build_drafter, build_target
from draftline.pipeline.devices import Place, Replicas
from draftline.pipeline.job import Job, max_documents
from draftline.pipeline.placement import SideTimes
from draftline.pipeline.plan import Plan
from draftline.pipeline.reduce import Member
from draftline.pipeline.schedule import Schedule
from draftline.target.load import Target, build_model, wrap_target
from draftline.target.selftest import choose_form

NUM_WARM = 3
NUM_TIMED = 20
"""Rows timed of each side; the median counts."""


@dataclass(frozen=True)
class Calibration:
    """What one device does with one row."""

    target_s: float
    drafter_s: float
    """Forward and backward of a row."""
    update_s: float
    """Clipping and AdamW, once a step."""
    tokens: float
    """Of the timed rows on average, padding excluded."""
    target_peak_bytes: int | None
    """Of device memory with the target's worker alone; None on a CPU."""
    peak_bytes: int | None
    """With both workers; None on a CPU, and where they were timed apart."""

    def times(self, rows_per_step: int) -> SideTimes:
        """Seconds a row of each side; the update is shared by the rows of a step."""
        return SideTimes(self.target_s, self.drafter_s + self.update_s / rows_per_step)


def random_target(
    config: TargetConfig, target_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Target:
    """A target in the shape of `target_config` with random weights; it has no tokenizer."""
    torch.manual_seed(0)
    model = build_model(config, target_config, device, dtype)
    nn.Module.to(model, device)  # whatever was made on the CPU in spite of it
    model.eval().requires_grad_(requires_grad=False)
    return wrap_target(config.path, model, cast("Any", None))


def calibration_job(
    target: Target,
    spec: DrafterSpec,
    plan: Plan,
    shape: RowShape,
    store: DocumentStore,
    chunk_rows: int,
    rows_per_step: int = 1,
) -> Job:
    """A job of one worker of each side on the target's device, in turn."""
    num_rows = NUM_WARM + NUM_TIMED
    return Job(
        spec=spec,
        plan=plan,
        schedule=Schedule(num_rows, rows_per_step, 1, 1),
        shape=shape,
        source=RowSource(store, shape, seed=0),
        target=target,
        form=choose_form(target.model, spec.target_layer_ids, flash=plan.backend == "flash").form,
        max_documents=max_documents(torch.from_numpy(store.lengths), shape.token_budget),
        optim=OptimConfig(steps=num_rows),
        loss=LossConfig(chunk_rows=chunk_rows),
        deadlines=DeadlineConfig(),
        boundaries=frozenset(),
        seed=0,
    )


def calibrate(job: Job, *, apart: bool = False) -> Calibration:
    """Build both workers of `job` and time them, in a thread of its own as in a run.

    Args:
        apart: for a device that cannot hold both: the target's weights are thrown away once they are timed, and the
            drafter reads random states.

    Raises:
        AttentionFallbackError: the drafter's attention is not the promised kernel.
        StallError: it took longer than the start-up may.
        torch.OutOfMemoryError: they do not fit on the device.
    """
    if job.plan.backend != "sdpa":
        prepare_profiler()  # its first start belongs to the calling thread
    pool = ThreadPoolExecutor(1, thread_name_prefix="calibration")
    try:
        return pool.submit(_calibrate, job, apart).result(job.deadlines.startup_timeout_s)
    except TimeoutError:
        raise StallError(
            f"timing both sides took longer than deadlines.startup_timeout_s={job.deadlines.startup_timeout_s:g}"
        ) from None
    finally:
        pool.shutdown(wait=False)


def _calibrate(job: Job, apart: bool) -> Calibration:
    device = job.target.device
    place, replicas = Place.on(device), Replicas(job.target)
    rows = [job.source.row(index) for index in range(NUM_WARM + NUM_TIMED)]
    with place.entered():
        with gate.compiling("calibration", deadline_s=job.deadlines.startup_timeout_s):
            target = build_target(job, replicas, place, "calibration")
        target_s = _median_s(lambda i: (target.forward.load(rows[i]), target.step.replay()), place)
        target_peak, states = _peak(device), target.forward.states
        if apart:
            states = None
            del target
            keep_head(job.target)
        with gate.compiling("calibration", deadline_s=job.deadlines.startup_timeout_s):
            drafter = build_drafter(job, replicas, place, "calibration", 0, states)
        if apart:
            drafter.states.buffer.normal_()
        per_step = job.schedule.rows_per_drafter
        drafter_s = _median_s(
            lambda i: (drafter.row.load(rows[i]), drafter.step.replay(first=i % per_step == 0)), place
        )
        update_s = _median_s(lambda _: _update(drafter.member), place)
    return Calibration(
        target_s,
        drafter_s,
        update_s,
        statistics.mean(row.starts[-1] for row in rows),
        target_peak,
        None if apart else _peak(device),
    )


def _update(member: Member) -> None:
    """Clipping and AdamW, with this thread's stream waiting for them."""
    with member.updating():
        member.optimizer.square_sum()
        member.update.replay()
    member.await_update()


def keep_head(target: Target) -> None:
    """Give back the memory of all weights but the head, which is all that a drafter reads; the target cannot run any
    more."""
    head = target.head.untyped_storage().data_ptr()
    for weight in target.model.parameters():
        if weight.untyped_storage().data_ptr() != head:
            weight.untyped_storage().resize_(0)
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _median_s(work: Callable[[int], object], place: Place) -> float:
    """Median seconds of `work(row number)` on the current stream, after warm-up."""
    times = []
    for index in range(NUM_WARM + NUM_TIMED):
        place.settle()
        begin = time.perf_counter()
        work(index)
        place.settle()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[NUM_WARM:])
