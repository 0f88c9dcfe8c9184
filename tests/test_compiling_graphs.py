"""Launched and captured steps have one interface. What needs CUDA is checked in tests/gpu/compiling."""

from typing import cast

import pytest
import torch

from draftline.compiling import CapturedStep, LaunchedStep, Step, gate


def test_a_launched_step_calls_its_function_each_time_and_counts() -> None:
    total = torch.zeros(1)
    step: Step[torch.Tensor] = LaunchedStep(lambda: total.add_(1))
    assert [step.replay().item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert step.num_replays == 3


def test_a_step_that_fails_is_not_counted() -> None:
    step = LaunchedStep(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step.replay()
    assert step.num_replays == 0


def test_a_capture_outside_the_gate_is_refused() -> None:
    no_stream = cast(torch.cuda.Stream, None)
    with pytest.raises(RuntimeError, match="capturing a CUDA graph needs the gate"):
        CapturedStep(lambda: None, owners=[object()], stream=no_stream)
    with gate.running("a", deadline_s=1), pytest.raises(RuntimeError, match="needs the gate"):
        CapturedStep(lambda: None, owners=[object()], stream=no_stream)


def test_a_capture_without_owners_is_refused() -> None:
    no_stream = cast(torch.cuda.Stream, None)
    with gate.compiling("a", deadline_s=1), pytest.raises(ValueError, match="name the objects that own them"):
        CapturedStep(lambda: None, owners=[], stream=no_stream)
