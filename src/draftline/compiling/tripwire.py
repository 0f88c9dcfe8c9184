"""Makes the silent path of `flex_attention` loud: a dense call raises in the thread that made it.

`flex_attention` runs as a block-sparse kernel only while Dynamo traces the call. Everything else (a compiled
wrapper that fell back, a caller that forgot to compile, a full recompile limit) runs a dense implementation
that holds all of QK^T in memory, with one warning for the whole process. Its forward and its backward both
go through one private function, which this module replaces; a traced call reaches it with fake tensors only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from draftline.compiling.internals import private
from draftline.errors import AttentionFallbackError

_MODULE = "torch._higher_order_ops.flex_attention"
_FUNCTION = "_math_attention_inner"


@dataclass(frozen=True)
class DenseCall:
    """One refused call of dense attention."""

    thread: str
    query: tuple[int, ...]  # [batch, heads, queries, head_dim]
    key: tuple[int, ...]  # [batch, kv_heads, keys, head_dim]


class Tripwire:
    """Counts its arms, so that `armed()` may be nested inside a process that called `arm()`.

    The function it replaces is the process's, so programs use the functions of this module.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_arms = 0
        self._original: Callable[..., Any] | None = None
        self._calls: list[DenseCall] = []

    @property
    def calls(self) -> tuple[DenseCall, ...]:
        """Every dense call that was refused since the process started, also where the error was caught."""
        return tuple(self._calls)

    def arm(self) -> None:
        """Refuse dense flex_attention in every thread from now on.

        Raises:
            AttentionFallbackError: this PyTorch lacks the private function; nothing is armed.
        """
        with self._lock:
            if not self._num_arms:
                self._original = private(_MODULE, _FUNCTION)
                setattr(sys.modules[_MODULE], _FUNCTION, self._refuse_real_tensors)
            self._num_arms += 1

    def disarm(self) -> None:
        """Undo one `arm`. The last one puts PyTorch's function back."""
        with self._lock:
            if not self._num_arms:
                raise RuntimeError("the tripwire is not armed")
            self._num_arms -= 1
            if not self._num_arms:
                setattr(sys.modules[_MODULE], _FUNCTION, self._original)

    @contextmanager
    def armed(self) -> Iterator[Tripwire]:
        """Armed inside the `with` block."""
        self.arm()
        try:
            yield self
        finally:
            self.disarm()

    def _refuse_real_tensors(self, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        if isinstance(query, FakeTensor | FunctionalTensor):  # a trace works out shapes and computes nothing
            assert self._original is not None
            return self._original(query, key, *rest, **options)
        call = DenseCall(threading.current_thread().name, tuple(query.shape), tuple(key.shape))
        self._calls.append(call)
        raise AttentionFallbackError(
            f"thread {call.thread} ran flex_attention uncompiled, as dense attention, with query "
            f"{call.query} and key {call.key}; call it through torch.compile, compiled inside gate.compiling"
        )


_PROCESS = Tripwire()
arm = _PROCESS.arm
disarm = _PROCESS.disarm
armed = _PROCESS.armed


def dense_calls() -> tuple[DenseCall, ...]:
    """Every dense flex_attention call that was refused in this process."""
    return _PROCESS.calls
