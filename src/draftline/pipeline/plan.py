"""Where everything runs: decided once before anything loads, printed, and never changed afterwards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from draftline.config import Linears, PlacementConfig
from draftline.drafter.step import Backend
from draftline.errors import ConfigError

Devices = tuple[torch.device, ...]
FOR_GPUS = "to plan for GPUs that are not here, describe them: draftline plan run.yaml --devices 8"


@dataclass(frozen=True)
class Plan:
    """Placement of a run's workers. In a colocated plan target i and drafter i are one worker."""

    mode: Literal["split", "colocated"]
    targets: Devices
    drafters: Devices
    backend: Backend
    drafter_dtype: torch.dtype
    linears: Linears
    channel_slots: int
    cpu_threads: int
    """Threads of one operator on a CPU."""

    def describe(self) -> list[str]:
        """The plan as lines for a person."""
        kernel = {
            "flex": "compiled block-sparse flex_attention",
            "flash": "block-sparse FlashAttention 4, also for packed targets in half precision; two runs differ in "
            "their last bits",
            "sdpa": "SDPA with a boolean mask, tile by tile",
        }
        devices = {
            "split": f"targets on {_names(self.targets)}, drafters on {_names(self.drafters)}",
            "colocated": f"each of {_names(self.drafters)} runs target and drafter in turn",
        }
        linears = {
            "drafter_dtype": [],
            "float8": ["linears     products in float8 with dynamic scales, training only"],
            "float8_emulated": ["linears     float8 emulated: its rounding without its speed, training only"],
        }
        return [
            f"placement   {self.mode}: {devices[self.mode]}",
            f"attention   {self.backend}: {kernel[self.backend]}",
            f"drafter     computes in {str(self.drafter_dtype).removeprefix('torch.')}, masters in float32",
            *linears[self.linears],
        ]


def _names(devices: Devices) -> str:
    return ", ".join(
        f"{devices.count(d)} x {d}" if devices.count(d) > 1 else str(d) for d in dict.fromkeys(devices)
    )


def available_devices() -> Devices:
    """All CUDA devices, or the CPU."""
    count = torch.cuda.device_count()
    return tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)


def make_plan(config: PlacementConfig) -> Plan:
    """Resolve every `auto`.

    Raises:
        ConfigError: a device does not exist, target and drafter lists do not fit the mode, or the attention
            backend or the products of linear maps are not for the devices.
    """
    return _resolved(config, *_place(config))


def plan_for_gpus(config: PlacementConfig) -> Plan:
    """What a worker on a GPU does, which need not be here: for counting.

    Raises:
        ConfigError: the attention backend, or the products of linear maps, are not for GPUs.
    """
    gpu = (torch.device("cuda", 0),)
    return _resolved(config, "colocated", gpu, gpu)


def _resolved(
    config: PlacementConfig, mode: Literal["split", "colocated"], targets: Devices, drafters: Devices
) -> Plan:
    kinds = {device.type for device in (*targets, *drafters)}
    if len(kinds) > 1:
        raise ConfigError(f"placement mixes {' and '.join(sorted(kinds))}; use devices of one kind")
    on_cuda = kinds == {"cuda"}
    return Plan(
        mode=mode,
        targets=targets,
        drafters=drafters,
        backend=choose_backend(config.attention, on_cuda=on_cuda),
        drafter_dtype=_choose_dtype(config.drafter_dtype, on_cuda=on_cuda),
        linears=_choose_linears(config.drafter_linears, on_cuda=on_cuda),
        channel_slots=config.channel_slots,
        cpu_threads=max(1, (os.cpu_count() or 1) // _num_workers(mode, targets, drafters)),
    )


def _num_workers(mode: str, targets: Devices, drafters: Devices) -> int:
    return len(drafters) + (len(targets) if mode == "split" else 0)


def _place(
    config: PlacementConfig,
) -> tuple[Literal["split", "colocated"], Devices, Devices]:
    named = (
        [_parse(name) for name in (config.targets or ())],
        [_parse(name) for name in (config.drafters or ())],
    )
    targets, drafters = (tuple(devices) for devices in named)
    everything = available_devices()
    if config.mode == "auto":
        split = bool(targets and drafters) or len(everything) > 1
        mode: Literal["split", "colocated"] = "split" if split else "colocated"
    else:
        mode = config.mode
    if mode == "colocated":
        both = drafters or targets or everything
        if targets and drafters and targets != drafters:
            raise ConfigError(
                "placement.mode=colocated runs target and drafter on the same devices, but placement.targets and "
                "placement.drafters differ; name one of them, or use mode: split"
            )
        return mode, both, both
    return mode, *_split(targets, drafters, everything)


def _split(targets: Devices, drafters: Devices, everything: Devices) -> tuple[Devices, Devices]:
    """Devices of both sides: as named; a side that is not named takes what the other leaves."""
    half = len(everything) // 2
    if not targets and not drafters and half:
        return everything[:-half], everything[-half:]
    free = tuple(device for device in everything if device not in targets + drafters) or everything
    return targets or free, drafters or free


def _parse(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"placement names the device {name!r}; write cpu, or cuda:0, cuda:1, ...") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = device.index or 0
    if device.type != "cuda" or index >= count:
        raise ConfigError(
            f"placement asks for {name}, but this machine has {count} CUDA devices; use fewer, or cpu"
        )
    return torch.device("cuda", index)


def choose_backend(wanted: str, *, on_cuda: bool) -> Backend:
    """What `placement.attention` means on a device.

    Raises:
        ConfigError: it is not for such a device.
    """
    if wanted == "flex" and not on_cuda:
        raise ConfigError(
            "placement.attention=flex cannot train on a CPU (PyTorch has no flex_attention backward there); use "
            f"attention: sdpa or auto; {FOR_GPUS}"
        )
    if wanted == "flash" and not on_cuda:
        raise ConfigError(
            "placement.attention=flash needs GPUs: FlashAttention 4 has no kernels for a CPU; use attention: sdpa or "
            f"auto; {FOR_GPUS}"
        )
    if wanted == "sdpa" and on_cuda:
        raise ConfigError(
            "placement.attention=sdpa is the CPU's backend: dense attention on a GPU is several times slower and "
            "needs gigabytes for its scores; use attention: flex or auto"
        )
    if not on_cuda:
        return "sdpa"
    return "flash" if wanted == "flash" else "flex"


def _choose_dtype(wanted: str, *, on_cuda: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if on_cuda else torch.float32
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _choose_linears(wanted: Linears, *, on_cuda: bool) -> Linears:
    if wanted == "float8" and not on_cuda:
        raise ConfigError(
            "placement.drafter_linears=float8 needs a GPU: a CPU has no float8 products; use float8_emulated for their "
            f"rounding without their speed, or leave it out; {FOR_GPUS}"
        )
    if wanted == "float8_emulated" and on_cuda:
        raise ConfigError(
            "placement.drafter_linears=float8_emulated is for a CPU: on a GPU it would be slower than bfloat16; use "
            "float8, or leave it out"
        )
    return wanted
