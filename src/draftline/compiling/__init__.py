"""Compile safety for multi-threaded PyTorch programs: gate, proof, capture, seal, tripwire.

Knows nothing of DFlash. docs/compiling.md is its page; the order of use in a program:

1. `tripwire.arm()` and `prepare_profiler()` on the main thread: dense flex_attention raises from here on.
2. Each worker thread, inside `gate.compiling`: build, run whole steps with functions from
   `compile_isolated`, `prove` what ran, and on CUDA record a `CapturedStep`.
3. `seal()` when all are done: whatever would compile now is an error.
"""

from draftline.compiling import gate, tripwire
from draftline.compiling.graphs import CapturedStep, LaunchedStep, Step
from draftline.compiling.isolate import cache_entries, compile_isolated, isolated_code
from draftline.compiling.proof import (
    FLASH_BACKWARD,
    FLASH_FORWARD,
    FLEX_BACKWARD,
    FLEX_FORWARD,
    SDPA,
    Expectation,
    Proof,
    prepare_profiler,
    prove,
)
from draftline.compiling.seal import Seal, Violation, seal, unseal
from draftline.compiling.watch import Compilation, compilations

__all__ = [
    "FLASH_BACKWARD",
    "FLASH_FORWARD",
    "FLEX_BACKWARD",
    "FLEX_FORWARD",
    "SDPA",
    "CapturedStep",
    "Compilation",
    "Expectation",
    "LaunchedStep",
    "Proof",
    "Seal",
    "Step",
    "Violation",
    "cache_entries",
    "compilations",
    "compile_isolated",
    "gate",
    "isolated_code",
    "prepare_profiler",
    "prove",
    "seal",
    "tripwire",
    "unseal",
]
