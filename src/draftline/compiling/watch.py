"""See every compilation of the process: what set it off, and in which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._dynamo.callback import CallbackArgs, callback_handler


@dataclass(frozen=True)
class Compilation:
    """One start of a compiler."""

    thread: str
    trigger: str
    """`dynamo` (a traced function), `lazy_backward` or `cudagraph_recording`."""
    compile_id: str
    """PyTorch's own name for it, as in its logs: "3/1" is the second compilation of frame 3."""


def describe(args: CallbackArgs) -> Compilation:
    """The compilation that PyTorch's compile-start callback announces, in the thread it starts in."""
    return Compilation(
        threading.current_thread().name, args.callback_trigger.name.lower(), str(args.compile_id)
    )


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """A list that grows with every compilation that starts inside the `with` block, in any thread.

    Of compilations that overlap PyTorch announces the first; inside `gate.compiling` none overlap.
    """
    seen: list[Compilation] = []

    def note(args: CallbackArgs) -> None:
        seen.append(describe(args))

    callback_handler.register_start_callback(note)
    try:
        yield seen
    finally:
        callback_handler.remove_start_callback(note)
