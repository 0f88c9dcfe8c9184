"""What workers of a process share, and what a copy for another device takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from draftline.config import TargetConfig
from draftline.pipeline import calibrate
from draftline.pipeline.calibrate import keep_head, random_target
from draftline.pipeline.devices import Replicas, copy_to
from draftline.target.load import wrap_target
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


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_drafter_away_from_its_target_gets_the_head_and_nothing_else(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    target = wrap_target("here", model(family), cast("Any", None))
    moved: list[Tensor] = []
    to = Tensor.to

    def spy(tensor: Tensor, *given: Any, **rest: Any) -> Tensor:
        moved.append(tensor)
        return to(tensor, *given, **rest)

    monkeypatch.setattr(Tensor, "to", spy)
    replicas, elsewhere = Replicas(target), torch.device("meta")
    head = replicas.head(elsewhere)
    assert head.device == elsewhere
    assert [tensor.data_ptr() for tensor in moved] == [target.head.data_ptr()]
    assert replicas.head(elsewhere) is head, "two drafters there share it"
    assert replicas.head(target.device).data_ptr() == target.head.data_ptr()


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_head_of_a_target_is_kept_where_a_device_cannot_hold_more(tied: bool):
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    target = random_target(TargetConfig(path="tiny"), config, torch.float32, torch.device("cpu"))
    before = target.head.clone()
    keep_head(target)
    assert torch.equal(target.head, before)
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in target.model.parameters()}
    assert sum(sizes.values()) == before.nbytes
    assert (target.embedding.untyped_storage().nbytes() > 0) == tied


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
