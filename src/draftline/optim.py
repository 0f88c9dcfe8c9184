"""Flat parameters, their float32 masters, and AdamW sharded over the drafters of one process.

All parameters of a drafter lie in one flat tensor, matrices first and norm vectors last, so that a step is a
few kernels on long vectors, a shard is a slice, and gradients travel as one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftline.config import OptimConfig

ALIGNMENT = 128
"""Elements; shard bounds are multiples of it, so that vector loads stay aligned."""


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in the flat tensor."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    num_decayed: int
    """Elements of matrices; they come first, and only they are decayed."""
    size: int
    """Elements, padded so that every shard is equally long."""

    @classmethod
    def of(cls, module: nn.Module, num_shards: int) -> FlatLayout:
        """Lay out a module's parameters for `num_shards` drafters."""
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() < 2)
        offsets, total, num_decayed = [], 0, 0
        for _, parameter in named:
            offsets.append(total)
            total += parameter.numel()
            if parameter.dim() > 1:
                num_decayed = total
        unit = ALIGNMENT * num_shards
        return cls(
            names=tuple(name for name, _ in named),
            shapes=tuple(parameter.shape for _, parameter in named),
            offsets=tuple(offsets),
            num_decayed=num_decayed,
            size=-(-total // unit) * unit,
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Parameters by name as views of a flat tensor of this layout."""
        return {
            name: flat[offset : offset + shape.numel()].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def shard(self, index: int, num_shards: int) -> slice:
        """Slice of the flat tensor that drafter `index` owns."""
        length = self.size // num_shards
        return slice(index * length, (index + 1) * length)


class FlatParameters:
    """A drafter's compute weights and accumulated gradients as flat tensors.

    The module's parameters become views of `weights`; `gradients` is float32 whatever the compute type, so
    that rows add up exactly as they would in one batch.
    """

    def __init__(self, module: nn.Module, num_shards: int, dtype: torch.dtype) -> None:
        device = next(module.parameters()).device
        self.layout = FlatLayout.of(module, num_shards)
        self.weights = torch.zeros(self.layout.size, device=device, dtype=dtype)
        self.gradients = torch.zeros(self.layout.size, device=device, dtype=torch.float32)
        self.masters = torch.zeros(self.layout.size, dtype=torch.float32)  # initial values, on the host
        parameters = dict(module.named_parameters())
        for name, view in self.layout.views(self.masters).items():
            view.copy_(parameters[name].detach())
        self.weights.copy_(self.masters)
        for name, view in self.layout.views(self.weights).items():
            parameters[name].data = view
        self.parameters: list[nn.Parameter] = [parameters[name] for name in self.layout.names]
        self._gradient_views = list(self.layout.views(self.gradients).values())

    def accumulate(self, gradients: Iterable[Tensor]) -> None:
        """Add one row's gradients, given in the order of `parameters`."""
        for view, gradient in zip(self._gradient_views, gradients, strict=True):
            view.add_(gradient)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak. `step` counts from 0."""
    warmup = max(1, round(config.warmup_ratio * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


class ShardedAdamW:
    """AdamW on one drafter's shard: float32 masters, clipping and the finite check folded into the update.

    Everything stays on the device: a step whose gradient is not finite changes nothing (the fused kernel is
    told through `found_inf`), nor does any later one, so that the state of the bad step is still there when the
    host learns of it, without a synchronisation.
    """

    def __init__(self, parameters: FlatParameters, index: int, num_shards: int, config: OptimConfig) -> None:
        device = parameters.weights.device
        self.slice = parameters.layout.shard(index, num_shards)
        self.weights = parameters.weights[self.slice]
        shares_storage = parameters.weights.dtype == torch.float32
        self.master = self.weights if shares_storage else parameters.masters[self.slice].to(device)
        # a single drafter steps straight from its own sums
        self.gradient = parameters.gradients if num_shards == 1 else torch.zeros_like(self.master)
        self.clip_norm = config.clip_norm
        self.lr = torch.zeros((), device=device)
        self.found_inf = torch.zeros((), device=device)
        self.grad_scale = torch.ones((), device=device)
        self._optimizer = self._build(parameters.layout.num_decayed, config)
        self._prime()

    def _build(self, num_decayed: int, config: OptimConfig) -> torch.optim.AdamW:
        cut = min(max(num_decayed - self.slice.start, 0), self.master.numel())
        groups = []
        for part, decay in ((slice(0, cut), config.weight_decay), (slice(cut, None), 0.0)):
            if self.master[part].numel():
                parameter = nn.Parameter(self.master[part])
                parameter.grad = self.gradient[part]
                groups.append({"params": [parameter], "weight_decay": decay})
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=config.betas, fused=True)
        # the fused kernel divides gradients by grad_scale and skips the update when found_inf is 1
        optimizer.grad_scale = self.grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = self.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        return optimizer

    def _prime(self) -> None:
        """Make the moments exist at fixed addresses before any capture; an update with found_inf changes nothing."""
        self.found_inf.fill_(1.0)
        self._optimizer.step()
        self.found_inf.zero_()

    def square_sum(self) -> Tensor:
        """Sum of squares of the shard's gradient, float32 scalar."""
        return self.gradient.square().sum()

    def update(self, square_sum: Tensor, total_weight: Tensor) -> Tensor:
        """Clip by the global norm and step; returns the gradient norm [] (not finite: nothing was changed).

        Args:
            square_sum: sum of squares over all shards of the *unnormalised* gradient.
            total_weight: sum of slot weights of the whole optimizer step.
        """
        weight = total_weight.clamp_min(torch.finfo(torch.float32).tiny)
        norm = square_sum.sqrt() / weight
        self.found_inf.copy_(torch.maximum(self.found_inf, 1.0 - torch.isfinite(norm).float()))
        self.grad_scale.copy_(weight * (norm / self.clip_norm).clamp_min(1.0))
        self._optimizer.step()
        if self.weights.dtype != torch.float32:
            self.weights.copy_(self.master)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Masters and moments of the shard, each float32 [shard], and the step count []."""
        moments = [
            self._optimizer.state[p] for group in self._optimizer.param_groups for p in group["params"]
        ]
        return {
            "master": self.master,
            "exp_avg": torch.cat([m["exp_avg"] for m in moments]),
            "exp_avg_sq": torch.cat([m["exp_avg_sq"] for m in moments]),
            "step": moments[0]["step"],
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Write a saved state to the existing addresses, so that captured graphs stay valid."""
        self.master.copy_(state["master"])
        if self.weights.dtype != torch.float32:
            self.weights.copy_(self.master)
        begin = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                own, end = self._optimizer.state[parameter], begin + parameter.numel()
                own["exp_avg"].copy_(state["exp_avg"][begin:end])
                own["exp_avg_sq"].copy_(state["exp_avg_sq"][begin:end])
                own["step"].copy_(state["step"])
                begin = end
