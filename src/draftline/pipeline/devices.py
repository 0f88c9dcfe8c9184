"""A worker's place on a device, and the target's tensors there; copies are made once per device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline.config import DrafterSpec
from draftline.drafter.model import new_weights
from draftline.target.load import Target, tables_of


@dataclass(frozen=True)
class Place:
    """Device and stream of one worker; a CPU has no stream."""

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> Place:
        """A place with a stream of its own."""
        return cls(device, torch.cuda.Stream(device) if device.type == "cuda" else None)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the calling thread's current device and stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def settle(self) -> None:
        """Wait for this worker's own work; between the phases of start-up only."""
        if self.stream is not None:
            self.stream.synchronize()


def copy_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy of a frozen model whose tensors are made on `device`: a copy first made beside the original would need
    a second target's memory there."""
    moved: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there
    return copy.deepcopy(model, moved)


class Replicas:
    """What workers of a process share: the target on any device of the run, and the drafter's first weights."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._models: dict[torch.device, PreTrainedModel] = {target.device: target.model}
        self._heads: dict[torch.device, Tensor] = {}
        self._initial: dict[tuple[str, int], dict[str, Tensor]] = {}

    def initial_weights(self, spec: DrafterSpec, seed: int) -> dict[str, Tensor]:
        """Weights of a new drafter, drawn once for all drafters."""
        with self._lock:
            key = spec.model_dump_json(), seed
            if key not in self._initial:
                self._initial[key] = new_weights(spec, seed)
            return self._initial[key]

    def release_initial(self) -> None:
        """Let go of the drafter's first weights, once all drafters have theirs."""
        with self._lock:
            self._initial.clear()

    def model(self, device: torch.device) -> PreTrainedModel:
        """The whole target on `device`; workers there share its weights."""
        with self._lock:
            if device not in self._models:
                self._models[device] = copy_to(self._target.model, device)
                self._settle(device)
            return self._models[device]

    def head(self, device: torch.device) -> Tensor:
        """The target's head [V, D] on `device`, for a drafter there."""
        with self._lock:
            if device in self._models:
                return tables_of(self._models[device])[1]
            if device not in self._heads:
                self._heads[device] = self._target.head.to(device)
                self._settle(device)
            return self._heads[device]

    @staticmethod
    def _settle(device: torch.device) -> None:
        """The next user of the copy may be on another stream."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
