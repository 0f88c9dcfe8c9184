"""Dense flex_attention raises in every thread; compiled flex_attention does not notice the wire."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from draftline.compiling import compile_isolated, gate, tripwire
from draftline.errors import AttentionFallbackError

MODULE = "torch._higher_order_ops.flex_attention"
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def attention(q: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, q, q)


def test_a_dense_call_in_another_thread_raises_and_is_counted() -> None:
    q = torch.ones(1, 2, 8, 16)
    before = len(tripwire.dense_calls())
    with tripwire.armed(), ThreadPoolExecutor(1, thread_name_prefix="stray") as pool:
        with pytest.raises(
            AttentionFallbackError, match=r"thread stray_0 ran flex_attention uncompiled"
        ) as error:
            pool.submit(attention, q).result(30)
        assert "(1, 2, 8, 16)" in str(error.value)
        (call,) = tripwire.dense_calls()[before:]
        assert (call.thread, call.query) == ("stray_0", (1, 2, 8, 16))


def test_a_compiler_that_does_not_lower_flex_attention_is_dense_and_refused() -> None:
    compiled = compile_isolated(attention, "lowered", backend="aot_eager")
    with (
        tripwire.armed(),
        gate.compiling("lowered", deadline_s=1),
        pytest.raises(AttentionFallbackError, match="uncompiled"),
    ):
        compiled(torch.ones(1, 2, 8, 16))


def test_a_trace_passes_through_the_wire() -> None:
    compiled = compile_isolated(attention, "traced", backend=_only_trace)
    before = len(tripwire.dense_calls())
    with tripwire.armed(), gate.compiling("traced", deadline_s=1):
        compiled(torch.ones(1, 2, 8, 16))
    assert len(tripwire.dense_calls()) == before


def _only_trace(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    return lambda *args: (args[0],)


def test_after_disarming_pytorch_has_its_own_function_back() -> None:
    original = vars(sys.modules[MODULE])["_math_attention_inner"]
    with tripwire.armed():
        with tripwire.armed():
            pass
        assert vars(sys.modules[MODULE])["_math_attention_inner"] is not original
    assert vars(sys.modules[MODULE])["_math_attention_inner"] is original
    assert attention(torch.ones(1, 1, 8, 16)).shape == (1, 1, 8, 16)
    with pytest.raises(RuntimeError, match="not armed"):
        tripwire.disarm()


def test_a_pytorch_without_the_private_function_refuses_to_be_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[MODULE], "_math_attention_inner")
    with pytest.raises(
        AttentionFallbackError, match=r"has no torch._higher_order_ops.flex_attention._math_att"
    ):
        tripwire.arm()


def test_threads_that_arm_and_disarm_at_once_leave_pytorch_as_it_was() -> None:
    original = vars(sys.modules[MODULE])["_math_attention_inner"]

    def spin() -> None:
        for _ in range(200):
            with tripwire.armed():
                pass

    workers = [threading.Thread(target=spin) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert vars(sys.modules[MODULE])["_math_attention_inner"] is original
