"""A code object of its own for every worker's compiled function.

Dynamo's cache hangs on the code object, not on the wrapper and not on the thread: workers that compile one
function share its entries, its recompile limit (8, for all devices together) and its lookup, which is not
thread-safe. A private copy of the code object shares nothing.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from draftline.compiling.internals import private

P = ParamSpec("P")
R = TypeVar("R")
REPEATABLE = {"deterministic": True}
"""Inductor's options. Otherwise it times several forms of a reduction on the device and keeps the fastest, so two
compilations of one step can round differently, and two workers, or two runs, disagree in the last bit."""


def isolated_code(fn: Callable[P, R], label: str) -> Callable[P, R]:
    """A function that does what `fn` does, with a code object that nobody else has.

    Args:
        fn: a Python function, or a method bound to its object.
        label: the worker's name; it becomes part of the copy's name in logs and errors.

    Raises:
        TypeError: `fn` is no Python function (give a module's `forward`, not the module).
    """
    if isinstance(fn, types.MethodType):
        return types.MethodType(isolated_code(fn.__func__, label), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        raise TypeError(f"{fn!r} has no code object to copy; give a Python function or a bound method")
    suffix = re.sub(r"[^0-9A-Za-z_]", "_", label)
    name = f"{fn.__name__}_{suffix}"
    code = fn.__code__.replace(co_name=name, co_qualname=f"{fn.__qualname__}_{suffix}")
    copy = types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def compile_isolated(
    fn: Callable[P, R], label: str, *, backend: str | Callable[..., Any] = "inductor"
) -> Callable[P, R]:
    """`torch.compile` of `isolated_code(fn, label)`, in the form that cannot fall back.

    `fullgraph=True`: a graph break or a full cache is an error. `dynamic=False`: a new shape is a new
    compilation, never a slower kernel. Inductor chooses kernels without timing them (`REPEATABLE`).
    Compilation happens at the first call, which belongs inside `gate.compiling`.

    Raises:
        TypeError: see `isolated_code`.
    """
    options: Any = REPEATABLE if backend == "inductor" else None
    return torch.compile(
        isolated_code(fn, label), fullgraph=True, dynamic=False, backend=backend, options=options
    )


def cache_entries(compiled: Callable[..., Any]) -> int:
    """How many compilations a function made by `compile_isolated` holds: one for each set of guards."""
    entries = private("torch._dynamo.eval_frame", "_debug_get_cache_entry_list")
    return len(entries(inspect.unwrap(compiled).__code__))
