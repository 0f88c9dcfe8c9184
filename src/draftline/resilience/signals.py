"""SIGTERM and SIGINT: the first asks the run to stop after its step, the second ends the process at once.

    with StopOnSignal() as stop:
        while not stop.requested:
            ...one step...
        ...save...
    # exit 75: the same command goes on from here

Python runs signal handlers in the main thread, between two of its instructions. The main thread of a run
therefore only waits, in short slices, and never runs CUDA or compiles: a handler is never kept waiting.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from draftline.errors import Interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal:
    """A flag set by SIGTERM or SIGINT; the former handlers are restored at the end of the block."""

    def __init__(self) -> None:
        # A plain attribute: a threading.Event set in a handler can deadlock with the main thread's own wait.
        self._signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run should finish its step, save and end."""
        return self._signal is not None

    def __enter__(self) -> Self:
        """Install the handlers. Raises ValueError outside the main thread."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signal is not None:
            _say(f"second signal ({name}): ending at once; the last finished checkpoint counts")
            os._exit(1)
        self._signal = signal.Signals(number)
        _say(f"{name}: finishing this step, saving, then stopping; a second signal ends at once")

    def error(self, step: int) -> Interrupted:
        """What the run ends with once the checkpoint of `step` is saved (exit code 75)."""
        assert self._signal is not None
        return Interrupted(
            f"stopped by {self._signal.name} after step {step}; run the same command again to go on"
        )


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Before training there is nothing to save: SIGTERM ends the block at once, as Ctrl-C does.

    Raises:
        Interrupted: SIGTERM arrived.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted(
            "stopped by SIGTERM before training began; nothing was lost, run the same command again"
        )

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    # Not print: the handler may have interrupted a print, and buffered streams are not re-entrant. And the
    # terminal may be gone, which must not raise from whatever line the main thread is at.
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"draftline: {text}\n".encode())
