"""Proof by the kernels that ran: profile one warm step and compare it with what was promised.

Settings and warnings say what a program meant to run; only the profiler says what did.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from draftline.compiling import tripwire
from draftline.compiling.watch import Compilation, compilations
from draftline.errors import AttentionFallbackError

FLEX_FORWARD = r"^triton_tem_fused\w*flex_attention(?!\w*backward)"
"""GPU kernels of compiled flex_attention's forward: one a call (measured: PyTorch 2.11, H200)."""
FLEX_BACKWARD = r"^triton_tem_fused\w*flex_attention_backward"
"""GPU kernels of compiled flex_attention's backward: one a call."""
FLASH_FORWARD = r"FlashAttentionForwardSm\d+"
"""GPU kernels of FlashAttention 4's forward: one a call (flash-attn-4 4.0.0b36, H200)."""
FLASH_BACKWARD = r"FlashAttentionBackwardSm\d+"
"""Those of its backward that are neither preparation nor conversion: one a call."""
SDPA = r"^aten::_?scaled_dot_product\w*attention|fmha|pytorch_flash|native_sdpa"
"""scaled_dot_product_attention: its operators on a CPU, its fused kernels on a GPU."""

_MIB = 2**20
_NUM_SHOWN = 12


@dataclass(frozen=True)
class Expectation:
    """What one step must run."""

    counts: Mapping[str, int]
    """Regular expression, searched in names of GPU kernels (operators on a CPU): how often it must match in
    one step. A layer that checkpoints its attention runs its forward twice; 0 means never."""
    max_memory_bytes: int | None = None
    """Most memory the process may hold in tensors on the device during the step; None sets no bound."""


@dataclass(frozen=True)
class Proof:
    """What one step ran. `dataclasses.asdict` of it is ready for a log or a JSON file."""

    thread: str
    device: str
    counts: Mapping[str, int]
    """Expected pattern: how often it matched."""
    events: Mapping[str, int]
    """Every kernel (operator on a CPU) by name, most frequent first."""
    dense_calls: int
    """Dense flex_attention calls that the tripwire refused."""
    compilations: tuple[Compilation, ...]
    peak_memory_bytes: int | None
    """None on a CPU."""


def prepare_profiler() -> None:
    """Start the profiler once. Call it on the main thread, before any worker proves itself.

    PyTorch's profiler insists on being started first by the thread that imported it, and prints an error
    otherwise; what it starts (CUPTI on a GPU) also takes a moment that is better not spent in the gate.
    """
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True):
        pass


def prove(step: Callable[[], object], *, expect: Expectation, device: torch.device) -> Proof:
    """Run `step` once under the profiler and compare what ran with `expect`.

    Call it inside `gate.compiling`, on the worker's own thread and stream, after the step has run at least
    once: the profiler sees every stream of the device, so work of others would be counted as well.

    Args:
        step: one whole step; whatever it returns is dropped.
        device: where it runs. On CUDA its peak-memory statistics are reset.

    Raises:
        AttentionFallbackError: something else ran, flex_attention ran dense, something compiled, or memory
            passed its bound; the message lists what did run.
        ValueError: a memory bound was set for a CPU, which keeps no such statistics.
    """
    if expect.max_memory_bytes is not None and device.type != "cuda":
        raise ValueError(f"max_memory_bytes={expect.max_memory_bytes} cannot be proved on {device}; use None")
    num_dense_before = len(tripwire.dense_calls())
    with tripwire.armed(), compilations() as compiled:
        events = _profile(step, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    proof = Proof(
        thread=threading.current_thread().name,
        device=str(device),
        counts={pattern: _num_matches(pattern, events) for pattern in expect.counts},
        events=dict(events.most_common()),
        dense_calls=len(tripwire.dense_calls()) - num_dense_before,
        compilations=tuple(compiled),
        peak_memory_bytes=peak,
    )
    faults = _faults(proof, expect)
    if faults:
        raise AttentionFallbackError(
            f"the step of {proof.thread} on {device} is not what was promised: {'; '.join(faults)}. "
            f"It ran: {_summary(proof.events)}"
        )
    return proof


def _profile(step: Callable[[], object], device: torch.device) -> Counter[str]:
    """Names of what ran on `device` during one step, with their number."""
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            step()
        return Counter(event.name for event in profiler.events() or ())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    # No CPU activity: Inductor marks each launch with an operator that bears the kernel's name.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Counter(
        event.name
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and event.device_index == index
    )


def _num_matches(pattern: str, events: Counter[str]) -> int:
    return sum(count for name, count in events.items() if re.search(pattern, name))


def _faults(proof: Proof, expect: Expectation) -> list[str]:
    faults = [
        f"/{pattern}/ ran {proof.counts[pattern]} times instead of {expected}"
        for pattern, expected in expect.counts.items()
        if proof.counts[pattern] != expected
    ]
    if proof.dense_calls:
        faults.append(f"flex_attention ran dense {proof.dense_calls} times")
    if proof.compilations:
        what = ", ".join(f"{c.trigger} {c.compile_id} in {c.thread}" for c in proof.compilations)
        faults.append(f"it compiled ({what}), so it was not warm")
    bound = expect.max_memory_bytes
    if bound is not None and (proof.peak_memory_bytes or 0) > bound:
        faults.append(
            f"peak memory was {(proof.peak_memory_bytes or 0) / _MIB:.0f} MiB of {bound / _MIB:.0f} MiB"
        )
    return faults


def _summary(events: Mapping[str, int]) -> str:
    """Attention first, then the most frequent."""
    attention = [name for name in events if re.search(r"attention|fmha|flash", name)]
    others = [name for name in events if name not in attention]
    shown = (attention + others)[:_NUM_SHOWN]
    more = f" and {len(events) - len(shown)} more names" if len(events) > len(shown) else ""
    return ", ".join(f"{events[name]} x {name[:120]}" for name in shown) + more or "nothing"
