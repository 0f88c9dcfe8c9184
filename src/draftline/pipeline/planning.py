"""`draftline plan`, and `placement: auto`: from a target's configuration to the placement that wins, and why.

Only configurations are read. Memory is added up (memory.py); the time of a row on each side is measured on a GPU
with random weights (calibrate.py), or else follows from counted operations, which settles the order of placements
but not their speed unless the rate of a device is given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from draftline.config import DrafterSpec, PlacementConfig, RunConfig
from draftline.data.document import DocumentStore
from draftline.data.rows import RowSource
from draftline.data.store import TokenStore, open_store, read_manifest
from draftline.data.synthetic import SyntheticStore, mixed_lengths
from draftline.drafter.float8 import refuse_float8
from draftline.errors import ConfigError
from draftline.flash import refuse_flash
from draftline.pipeline.calibrate import Calibration, calibrate, calibration_job, random_target
from draftline.pipeline.costs import DrafterCost, TargetCost, count_target, head_dim
from draftline.pipeline.job import row_shape
from draftline.pipeline.memory import HEADROOM, Memory, Sizes, device_memory
from draftline.pipeline.placement import GIB, Mode, Option, SideTimes, choose, list_options
from draftline.pipeline.plan import Devices, Plan, available_devices, make_plan, plan_for_gpus
from draftline.target.load import Target, resolve_dtype, torch_dtype

NUM_SYNTHETIC = 2000
"""Documents that stand for the data set when there is none yet."""


@dataclass(frozen=True)
class Hardware:
    """What a plan is made for."""

    count: int
    """Devices."""
    memory_bytes: int
    """Of one device."""
    kind: str
    """cuda or cpu."""
    tflops: float | None = None
    """Rate that one device reaches on these steps, when none is here to be timed."""


@dataclass(frozen=True)
class Costs:
    """Everything about a run that placements depend on."""

    target: TargetCost
    drafter: DrafterCost
    sizes: Sizes

    def bytes_of(self, mode: Mode, num_targets: int, num_drafters: int) -> tuple[int, int]:
        """Bytes on a target's and on a drafter's device, one worker of a side each."""
        drafters = [f"drafter {i}" for i in range(num_drafters)]
        targets = drafters if mode == "colocated" else [f"target {i}" for i in range(num_targets)]
        used = self.on_devices(targets, drafters, split=mode == "split")
        return used[targets[0]].total, used[drafters[0]].total

    def on_devices(self, targets: Any, drafters: Any, *, split: bool) -> dict[Any, Memory]:
        """Memory of each device, by whatever names it."""
        return device_memory(targets, drafters, self.target, self.drafter, self.sizes, split=split)

    def counted_times(self, flops_per_s: float, document_tokens: float) -> SideTimes:
        """Seconds of a row on each side at an equal rate."""
        return SideTimes(
            self.target.flops(self.drafter.tokens, document_tokens) / flops_per_s,
            self.drafter.flops(document_tokens) / flops_per_s,
        )


@dataclass(frozen=True)
class Proposal:
    """The outcome of planning."""

    options: tuple[Option, ...]
    """Every placement, the fastest usable one first."""
    chosen: Option
    costs: Costs
    times: SideTimes
    source: Literal["timed", "given rate", "counted"]
    """Where the times come from; counted ones say only which placement is faster."""
    calibration: Calibration | None
    """What was timed, if anything was."""
    num_rows: int | None
    """Rows of the whole run; None without a prepared data set."""
    tokens_per_row: float
    """Padding excluded."""
    untimed: str | None = None
    """Why nothing was timed although it was asked for."""

    def tokens_per_s(self, option: Option) -> float | None:
        """Target tokens a second."""
        return None if self.source == "counted" else option.rows_per_s * self.tokens_per_row

    def hours(self, option: Option) -> float | None:
        """Of the whole run, without start-up and evaluation."""
        if self.num_rows is None or self.source == "counted":
            return None
        return self.num_rows / option.rows_per_s / 3600

    def why(self) -> str:
        """The reason for the choice in a sentence."""
        share = self.times.target_s / (self.times.target_s + self.times.drafter_s)
        basis = {
            "timed": "timed here, each side alone",
            "given rate": "counted operations at the rate given",
            "counted": "counted operations, both sides at one rate",
        }[self.source]
        refused = "; ".join(f"{option.name} {option.refusal}" for option in self.options if option.refusal)
        return (
            f"{self.chosen.name} trains the most rows a second of those that can be used: the target takes "
            f"{share:.0%} of a row's time and the drafter {1 - share:.0%} ({basis})"
            + (f". Not usable: {refused}" if refused else "")
        )


def run_costs(config: RunConfig, spec: DrafterSpec, sketch: Target, plan: Plan) -> Costs:
    """Count a run."""
    dtype = resolve_dtype(config.target.dtype, plan.targets[0], torch_dtype(sketch.model.config.dtype))
    return Costs(
        count_target(sketch.model, spec.target_layer_ids),
        DrafterCost(spec, config.rows.token_budget, config.rows.block_budget),
        Sizes(
            dtype.itemsize,
            plan.drafter_dtype.itemsize,
            dtype == plan.drafter_dtype,
            plan.linears == "float8",
            plan.backend == "flash",
            plan.channel_slots,
            config.loss.chunk_rows,
            config.optim.rows_per_step,
        ),
    )


def propose(
    config: RunConfig, spec: DrafterSpec, sketch: Target, hardware: Hardware, *, timed: bool
) -> Proposal:
    """Rate every placement on `hardware` and choose.

    Args:
        sketch: the target without weights, see `sketch_target`.
        timed: run a few rows of both sides on the first device here, with random weights.

    Raises:
        ConfigError: no placement can be used, or the drafter cannot attend or multiply as asked.
    """
    plan = _plan_of_one(config.placement, hardware)
    refuse_float8(plan.linears, spec, plan.drafters if timed else ())
    if plan.backend == "flash":
        refuse_flash(spec, head_dim(sketch.model.config), plan.drafter_dtype, plan.drafters if timed else ())
    costs = run_costs(config, spec, sketch, plan)
    store = planned_store(config, spec.vocab_size)
    source = RowSource(store, row_shape(config, spec, plan.backend), config.seed)
    way, untimed = _way_to_time(costs, plan.targets[0]) if timed else (None, None)
    calibration = _time_both(config, spec, sketch, plan, store, apart=way == "apart") if way else None
    if calibration is not None:
        times = calibration.times(config.optim.rows_per_step)
    else:
        times = costs.counted_times(1e12 * (hardware.tflops or 1.0), float(store.lengths.mean()))
    options = list_options(
        times,
        hardware.count,
        config.optim.rows_per_step,
        int(hardware.memory_bytes * (1 - HEADROOM)),
        costs.bytes_of,
    )
    return Proposal(
        options=tuple(options),
        chosen=choose(options),
        costs=costs,
        times=times,
        source="timed" if calibration else "given rate" if hardware.tflops else "counted",
        calibration=calibration,
        num_rows=_num_rows(config, source) if isinstance(store, TokenStore) else None,
        tokens_per_row=float(store.lengths.sum()) / source.rows_in(1.0),
        untimed=untimed,
    )


def _way_to_time(
    costs: Costs, device: torch.device
) -> tuple[Literal["together", "apart"] | None, str | None]:
    """How both sides can be timed on a device here, or why they cannot."""
    if device.type != "cuda":
        return "together", None
    room = torch.cuda.get_device_properties(device).total_memory * (1 - HEADROOM)
    if costs.bytes_of("colocated", 1, 1)[0] <= room:
        return "together", None
    target, drafter = costs.bytes_of("split", 1, 1)
    if max(target, drafter) <= room:
        return "apart", None
    return None, (
        f"Nothing was timed: the target needs {target / GIB:.3g} GiB and the drafter {drafter / GIB:.3g} GiB of a "
        f"device, of {device} {room / GIB:.3g} GiB may be used; times are counted"
    )


def _plan_of_one(wanted: PlacementConfig, hardware: Hardware) -> Plan:
    """Types, attention and slots of a worker on `hardware`, wherever the run puts it."""
    if hardware.kind == "cuda":
        return plan_for_gpus(wanted)
    return make_plan(wanted.model_copy(update={"mode": "auto", "targets": None, "drafters": None}))


def planned_store(config: RunConfig, vocab_size: int) -> DocumentStore:
    """The run's own token store if it is prepared, else documents of usual lengths."""
    path = Path(config.data.path)
    if path.is_dir() and read_manifest(path) is not None:
        return open_store(path, verify=False, on_corrupt=config.data.on_corrupt)  # only lengths are used
    longest = min(config.data.max_length, config.rows.token_budget)
    return SyntheticStore(mixed_lengths(NUM_SYNTHETIC, longest), vocab_size)


def _time_both(
    config: RunConfig, spec: DrafterSpec, sketch: Target, plan: Plan, store: DocumentStore, *, apart: bool
) -> Calibration:
    device = plan.targets[0]
    plan = replace(plan, mode="colocated", targets=(device,), drafters=(device,))
    target_config = sketch.model.config
    dtype = resolve_dtype(config.target.dtype, device, torch_dtype(target_config.dtype))
    loaded = random_target(config.target, target_config, dtype, device)
    shape = row_shape(config, spec, plan.backend)
    job = calibration_job(
        loaded, spec, plan, shape, store, config.loss.chunk_rows, config.optim.rows_per_step
    )
    return calibrate(job, apart=apart)


def _num_rows(config: RunConfig, source: RowSource) -> int:
    if config.optim.steps is not None:
        return config.optim.steps * config.optim.rows_per_step
    assert config.optim.epochs is not None
    return source.rows_in(config.optim.epochs)


def resolve_placement(config: RunConfig, spec: DrafterSpec, sketch: Target) -> PlacementConfig:
    """The placement with `auto` decided: among several GPUs by counted operations and memory.

    Anything that names devices or a mode is left as it is, and so is a machine with one device.

    Raises:
        ConfigError: no placement can be used.
    """
    wanted, devices = config.placement, available_devices()
    if wanted.mode != "auto" or wanted.targets or wanted.drafters or len(devices) == 1:
        return wanted
    names = tuple(str(device) for device in devices)
    chosen = propose(config, spec, sketch, _hardware(devices), timed=False).chosen
    if chosen.mode == "colocated":
        return wanted.model_copy(update={"mode": "colocated", "targets": names, "drafters": names})
    cut = chosen.num_targets
    return wanted.model_copy(update={"mode": "split", "targets": names[:cut], "drafters": names[cut:]})


def refuse_what_cannot_fit(config: RunConfig, spec: DrafterSpec, sketch: Target, plan: Plan) -> None:
    """Compare the memory that a plan needs with what its GPUs have; on a CPU nothing is refused.

    Raises:
        ConfigError: a device is too small; its largest parts are named.
    """
    costs = run_costs(config, spec, sketch, plan)
    used = costs.on_devices(plan.targets, plan.drafters, split=plan.mode == "split")
    for device, memory in used.items():
        if device.type != "cuda":
            continue
        capacity = torch.cuda.get_device_properties(device).total_memory
        if memory.total > capacity * (1 - HEADROOM):
            largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
            raise ConfigError(
                f"{device} has {capacity / GIB:.3g} GiB, of which {1 - HEADROOM:.0%} may be used, but this run needs "
                f"{memory.total / GIB:.3g} GiB there ({', '.join(f'{n} {b / GIB:.3g}' for n, b in largest)}). Lower "
                "rows.token_budget, rows.block_budget or loss.chunk_rows, or use more devices (`draftline plan`)"
            )


def hardware_here() -> Hardware:
    """The devices of this machine; a CPU counts as one device with the machine's memory."""
    return _hardware(available_devices())


def _hardware(devices: Devices) -> Hardware:
    if devices[0].type == "cuda":
        memory = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
        return Hardware(len(devices), memory, "cuda")
    return Hardware(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "cpu")
