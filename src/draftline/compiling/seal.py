"""After the seal, whatever would compile is an error: in the thread that tried, and for the supervisor.

A compilation in the run phase stalls its worker for seconds to minutes and endangers every other thread
(see `gate`), so the run stops with the reason instead. PyTorch's stance `fail_on_recompile` refuses a cache
miss of any compiled function in any thread, never compiled ones included; what it does not cover (a backward
lowered late, a CUDA graph recorded by Inductor) announces itself through the compile-start callback.
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler

from draftline.compiling.internals import private, require_no_tracing
from draftline.compiling.watch import describe
from draftline.errors import AttentionFallbackError

_MODULE = "torch._dynamo.eval_frame"
_FUNCTION = "_callback_from_stance"


@dataclass(frozen=True)
class Violation:
    """One attempt to compile after the seal."""

    thread: str
    function: str
    """Name and place, or what set the compilation off where no function is known."""
    reasons: tuple[str, ...]
    """The guards that failed, in PyTorch's words: "tensor 'x' size mismatch at index 0. expected 8, ..."."""

    def __str__(self) -> str:
        why = "; ".join(self.reasons)
        return (
            f"thread {self.thread} would compile {self.function} after the seal: {why}. Compile every shape, "
            "dtype and grad mode that the run needs inside gate.compiling, before seal()"
        )


class Seal:
    """What `seal` returns. Ends with `unseal`, or as a context manager."""

    def __init__(self) -> None:
        require_no_tracing("the process is about to be sealed")
        self._violations: list[Violation] = []
        self._original = private(_MODULE, _FUNCTION)
        self._stance = torch.compiler.set_stance("fail_on_recompile")
        setattr(sys.modules[_MODULE], _FUNCTION, self._callback_from_stance)
        callback_handler.register_start_callback(self._refuse_compilation)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Every attempt to compile since the seal, also where the thread caught the error."""
        return tuple(self._violations)

    def check(self) -> None:
        """Raise AttentionFallbackError for the first violation, if there is one."""
        if self._violations:
            raise AttentionFallbackError(str(self._violations[0]))

    def __enter__(self) -> Seal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        unseal()

    def _remove(self) -> None:
        callback_handler.remove_start_callback(self._refuse_compilation)
        setattr(sys.modules[_MODULE], _FUNCTION, self._original)
        self._stance.__exit__(None, None, None)

    def _callback_from_stance(self, callback: Any) -> Any:
        # The stance's own refusal is a RuntimeError that only its thread sees; this one is recorded too.
        refuse = self._original(callback)
        if not callable(refuse):
            return refuse

        def refuse_and_record(frame: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return refuse(frame, *args, **kwargs)
            except RuntimeError as error:
                code = frame.f_code
                place = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
                raise self._record(place, _failed_guards(str(error))) from error

        # Dynamo compares backends through this attribute; without it every cached entry would miss.
        refuse_and_record._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
        return refuse_and_record

    def _refuse_compilation(self, args: CallbackArgs) -> None:
        started = describe(args)
        raise self._record(f"{started.trigger} {started.compile_id}", ("it was left for the first use",))

    def _record(self, function: str, reasons: tuple[str, ...]) -> AttentionFallbackError:
        violation = Violation(threading.current_thread().name, function, reasons)
        self._violations.append(violation)
        return AttentionFallbackError(str(violation))


def _failed_guards(message: str) -> tuple[str, ...]:
    """The guards that the stance's message lists as `- 0/1: reason`, or that there was nothing to guard."""
    found = re.findall(r"^\s*- (?:\d+/\d+: )?(.+)$", message, flags=re.MULTILINE)
    return tuple(found) or ("it has never been compiled",)


class _Sealing:
    """Holds the process's seal: there is at most one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seal: Seal | None = None

    def seal(self) -> Seal:
        with self._lock:
            if self._seal is not None:
                raise RuntimeError("the process is sealed already; unseal() first")
            self._seal = Seal()
            return self._seal

    def unseal(self) -> None:
        with self._lock:
            if self._seal is None:
                raise RuntimeError("the process is not sealed")
            self._seal._remove()
            self._seal = None


_PROCESS = _Sealing()


def seal() -> Seal:
    """From now on, in every thread, an attempt to compile raises AttentionFallbackError and is recorded.

    Call it when every worker has compiled, proved and captured what it needs.

    Raises:
        AttentionFallbackError: tracing state of the process is set, or PyTorch lacks what the seal needs.
        RuntimeError: the process is sealed already.
    """
    return _PROCESS.seal()


def unseal() -> None:
    """Allow compilation again, as before `seal`.

    Raises:
        RuntimeError: the process is not sealed.
    """
    _PROCESS.unseal()
