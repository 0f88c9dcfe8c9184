"""After the seal whatever would compile is refused with the reason, and the supervisor can see it."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from draftline.compiling import Seal, compile_isolated, gate, seal, unseal
from draftline.errors import AttentionFallbackError


def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight).square().mean()


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(8, 8, requires_grad=True)


@pytest.fixture
def warm(weight: torch.Tensor) -> Loss:
    compiled = compile_isolated(loss, "worker", backend="aot_eager")
    with gate.compiling("worker", deadline_s=1):
        compiled(torch.ones(4, 8), weight).backward()
    return compiled


@pytest.fixture
def sealed(warm: Loss) -> Iterator[Seal]:
    with seal() as active:
        yield active


def in_thread(work: Callable[[], object], name: str = "drafter-1") -> Exception | None:
    """What `work` raised in a thread of that name."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the error is what the tests look at
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_what_is_warm_goes_on_working_in_every_thread(warm: Loss, weight: torch.Tensor, sealed: Seal) -> None:
    warm(torch.ones(4, 8), weight).backward()
    assert in_thread(lambda: warm(torch.ones(4, 8), weight).backward()) is None
    sealed.check()


def test_a_worker_that_meets_a_new_shape_is_refused_with_the_guard_that_failed(
    warm: Loss, weight: torch.Tensor, sealed: Seal
) -> None:
    error = in_thread(lambda: warm(torch.ones(5, 8), weight))
    assert isinstance(error, AttentionFallbackError)
    assert "thread drafter-1 would compile loss_worker" in str(error)
    assert "size mismatch at index 0. expected 4, actual 5" in str(error)
    assert error.exit_code == 9


def test_the_supervisor_sees_a_violation_that_the_worker_swallowed(
    warm: Loss, weight: torch.Tensor, sealed: Seal
) -> None:
    in_thread(lambda: warm(torch.ones(5, 8), weight))
    (violation,) = sealed.violations
    assert violation.thread == "drafter-1"
    assert "loss_worker" in violation.function
    assert "expected 4, actual 5" in violation.reasons[0]
    with pytest.raises(AttentionFallbackError, match="expected 4, actual 5"):
        sealed.check()


def test_a_function_that_was_never_compiled_is_refused(sealed: Seal) -> None:
    fresh = compile_isolated(lambda x: x.cos(), "late", backend="eager")
    assert "has never been compiled" in str(in_thread(lambda: fresh(torch.ones(3))))
    assert len(sealed.violations) == 1


def test_a_warm_up_without_gradients_does_not_cover_training(weight: torch.Tensor) -> None:
    compiled = compile_isolated(loss, "nograd", backend="aot_eager")
    with gate.compiling("nograd", deadline_s=1), torch.no_grad():
        compiled(torch.ones(4, 8), weight)
    with seal(), pytest.raises(AttentionFallbackError, match="grad_mode"):
        compiled(torch.ones(4, 8), weight)


def test_a_backward_that_was_left_for_later_is_refused(weight: torch.Tensor) -> None:
    lazy = torch.compile(loss, backend="aot_eager", fullgraph=True)
    value = lazy(torch.ones(4, 8), weight)  # outside the gate: nothing lowers the backward
    with seal() as active:
        with pytest.raises(AttentionFallbackError, match="lazy_backward"):
            value.backward()
        assert len(active.violations) == 1


def test_checkpointing_recomputes_after_the_seal_without_compiling(
    warm: Loss, weight: torch.Tensor, sealed: Seal
) -> None:
    value = checkpoint(warm, torch.ones(4, 8), weight, use_reentrant=False)
    assert isinstance(value, torch.Tensor)
    value.backward()
    sealed.check()


def test_eager_flex_attention_in_another_thread_is_refused_before_it_traces(sealed: Seal) -> None:
    q = torch.ones(1, 1, 8, 8)
    assert isinstance(in_thread(lambda: flex_attention(q, q, q), "stray"), AttentionFallbackError)
    assert sealed.violations[0].thread == "stray"


def test_after_unsealing_new_shapes_compile_again(warm: Loss, weight: torch.Tensor) -> None:
    seal()
    unseal()
    warm(torch.ones(6, 8), weight).backward()


def test_there_is_one_seal_at_a_time() -> None:
    with seal(), pytest.raises(RuntimeError, match="sealed already"):
        seal()
    with pytest.raises(RuntimeError, match="not sealed"):
        unseal()
