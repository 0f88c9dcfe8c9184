"""What workers of a process share, and what a copy for another device takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftline.pipeline import calibrate
from draftline.pipeline.devices import copy_to
from tests.target_families import model


def test_a_copy_for_another_device_is_made_there_and_not_beside_the_original(monkeypatch: pytest.MonkeyPatch):
    def refuse(tensor: Tensor, _memo: Any) -> Tensor:
        raise AssertionError(f"{tuple(tensor.shape)} was copied on {tensor.device} first")

    monkeypatch.setattr(Tensor, "__deepcopy__", refuse)
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", refuse)
    copied = copy_to(model("qwen3"), torch.device("meta"))
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"meta"}


def test_a_copy_computes_the_same_with_tensors_of_its_own_and_keeps_its_ties():
    original = model("gemma3")
    copied = copy_to(original, torch.device("cpu"))
    ids = torch.arange(5)[None]
    assert torch.equal(copied(input_ids=ids).logits, original(input_ids=ids).logits)
    ours, theirs = dict(copied.named_parameters()), dict(original.named_parameters())
    assert ours.keys() == theirs.keys()
    assert not {x.data_ptr() for x in ours.values()} & {x.data_ptr() for x in theirs.values()}
    assert not any(x.requires_grad for x in ours.values())
    assert copied.get_parameter("lm_head.weight") is copied.get_parameter("model.embed_tokens.weight")


def test_the_profiler_is_started_by_the_thread_that_asks_for_the_times(monkeypatch: pytest.MonkeyPatch):
    started: list[str] = []
    monkeypatch.setattr(
        calibrate, "prepare_profiler", lambda: started.append(threading.current_thread().name)
    )
    monkeypatch.setattr(calibrate, "_calibrate", lambda *_: None)
    for backend in ("flex", "flash", "sdpa"):
        deadlines = SimpleNamespace(startup_timeout_s=10)
        job = SimpleNamespace(plan=SimpleNamespace(backend=backend), deadlines=deadlines)
        calibrate.calibrate(cast("Any", job))
    assert started == [threading.current_thread().name] * 2, "dense attention needs no proof"
