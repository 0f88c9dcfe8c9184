"""The few private names of PyTorch that this package reads or replaces, and what to do when one is gone."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.fx import _symbolic_trace as symbolic_trace

from draftline.errors import AttentionFallbackError


def private(module_name: str, name: str) -> Any:
    """The private attribute `name` of a PyTorch module.

    Raises:
        AttentionFallbackError: this PyTorch has no such attribute, so the protection that hangs on it would
            be missing without a sign.
    """
    # importlib and sys.modules: `import torch._higher_order_ops.flex_attention as m` binds the operator of
    # that name, not the module.
    importlib.import_module(module_name)
    module = sys.modules[module_name]
    if name not in vars(module):
        raise AttentionFallbackError(
            f"PyTorch {torch.__version__} has no {module_name}.{name}, which draftline.compiling relies on; "
            "use a PyTorch version that its tests pass on (2.11 to 2.13)"
        )
    return vars(module)[name]


def tracing_leftovers() -> tuple[str, ...]:
    """Process-wide FX tracing state that is set although nothing should be tracing; empty when all is well.

    PyTorch keeps this state in module globals that each trace saves and restores. Two traces that overlap in
    two threads restore in the wrong order and leave it set for ever: then every compiled function in the
    process raises, or runs uncompiled. Only a restart clears it.
    """
    found = []
    if symbolic_trace.is_fx_symbolic_tracing():
        found.append("the FX tracing flag is set")
    if torch.nn.Module.__call__ is not symbolic_trace._orig_module_call:
        found.append("nn.Module.__call__ is replaced by a tracer")
    if torch.nn.Module.__getattr__ is not symbolic_trace._orig_module_getattr:
        found.append("nn.Module.__getattr__ is replaced by a tracer")
    return tuple(found)


def require_no_tracing(when: str) -> None:
    """Refuse to go on in a process whose FX state is set.

    Args:
        when: what is about to start or has just ended, for the message.

    Raises:
        AttentionFallbackError: names what is set; see `tracing_leftovers`.
    """
    found = tracing_leftovers()
    if found:
        raise AttentionFallbackError(
            f"{when}: {', '.join(found)}. Another thread traces or compiles outside the gate, or two traces "
            "overlapped earlier; compiled functions cannot be trusted in this process any more. Restart it, "
            "and put whatever compiles, traces or calls uncompiled flex_attention inside gate.compiling"
        )
