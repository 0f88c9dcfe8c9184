"""Flat parameters, their float32 masters, and AdamW sharded over the drafters of one process.

All parameters of a drafter lie in one flat tensor, matrices first and norm vectors last, so that a step is a
few kernels on long vectors, a shard is a slice, and gradients travel as one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config import OptimConfig

ALIGNMENT = 128
"""Elements; shard bounds are multiples of it, so that vector loads stay aligned."""
HALF = 0x8000
"""Half a unit in the last place of bfloat16, in the bits of a float32."""
PIECE = 2**26
"""Elements whose masters are taken apart or put together, or whose gradients come from another device, at one time:
all of them would take the memory that halves save, and more."""
EPSILON = 1e-8
"""Of AdamW's denominator."""


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


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 as bfloat16, rounded to the nearest, and the int16 that `join` needs to give it back bit by bit.

    The compute weights are the upper half of their masters, so that a master costs two bytes beside them, not
    four. A tie is rounded away from zero, because the distance to an even neighbour can be one too large for int16.
    """
    bits = master.view(torch.int32)
    upper = (bits + HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join(weights: Tensor, rest: Tensor) -> Tensor:
    """The float32 that `split` took apart."""
    return ((weights.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def compute_weights(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights that a drafter computes with, from their masters; those that have the type already, as they are."""
    return split(master.float())[0] if dtype == torch.bfloat16 else master.to(dtype)


class FlatParameters:
    """A drafter's compute weights and a step's gradients as flat tensors.

    The module's parameters become views of `weights`. Where several rows of a step add up, `gradients` is float32
    whatever the compute type, so that they add up exactly as they would in one batch; a single row needs no more
    than its own type.
    """

    def __init__(
        self,
        module: nn.Module,
        num_shards: int,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the flat tensors go; that of the module's parameters, which give the values, if None."""
        parameters = dict(module.named_parameters())
        self.layout = FlatLayout.of(module, num_shards)
        self.device = device or next(module.parameters()).device
        self.weights = torch.zeros(self.layout.size, device=self.device, dtype=dtype)
        self.gradients = torch.zeros(self.layout.size, device=self.device, dtype=gradient_dtype)
        self._initial = {name: parameter.detach() for name, parameter in parameters.items()}
        for name, view in self.layout.views(self.weights).items():
            view.copy_(compute_weights(self._initial[name].to(self.device), dtype))
            parameters[name].data = view
        self.parameters: list[nn.Parameter] = [parameters[name] for name in self.layout.names]
        self.gradient_views = list(self.layout.views(self.gradients).values())

    def initial_masters(self, part: slice) -> Tensor:
        """The module's values, float32 [part] of the flat layout; until `release_initial`."""
        flat = torch.zeros(part.stop - part.start, device=self.device)
        for name, shape, offset in zip(
            self.layout.names, self.layout.shapes, self.layout.offsets, strict=True
        ):
            begin, end = max(offset, part.start), min(offset + shape.numel(), part.stop)
            if begin < end:
                own = self._initial[name].flatten()[begin - offset : end - offset]
                flat[begin - part.start : end - part.start].copy_(own)
        return flat

    def release_initial(self) -> None:
        """Let go of the module's values, which lie on the host, once every optimizer has its masters."""
        self._initial.clear()

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Set a step's gradients to those of its first row, given in the order of `parameters`."""
        for view, gradient in zip(self.gradient_views, gradients, strict=True):
            view.copy_(gradient)

    def accumulate(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of a later row."""
        add_each(self.gradient_views, gradients)


def add_each(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """sums[i] += terms[i], in the type of the sums."""
    for total, term in zip(sums, terms, strict=True):
        total.add_(term)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak. `step` counts from 0."""
    warmup = max(1, round(config.warmup_ratio * num_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def adamw(
    weights: Tensor,  # [n]; the masters themselves in float32
    rest: Tensor | None,  # int16 [n]: what bfloat16 weights leave of their masters
    exp_avg: Tensor,  # float32 [n]
    exp_avg_sq: Tensor,  # float32 [n]
    gradient: Tensor,  # [n]
    rates: Tensor,  # float32 [7], see `ShardedAdamW.rates`
    decay: float,
) -> None:
    """One AdamW update (arXiv 1711.05101, as torch.optim.AdamW does it) in place, everything in one pass.

    With the rates of a withheld step every tensor keeps its value to the last bit, whatever the gradient holds.
    """
    keep, scale, toward, toward_sq, lr, step_size, root_correction = rates.unbind()
    # a product would carry a NaN on
    unit = torch.where(keep > 0, 0.0, gradient.float() * scale)
    average = exp_avg + (unit - exp_avg) * toward
    average_sq = exp_avg_sq + (unit * unit - exp_avg_sq) * toward_sq
    exp_avg.copy_(average)
    exp_avg_sq.copy_(average_sq)
    master = weights if rest is None else join(weights, rest)
    moved = master * (1 - lr * decay) - step_size * average / (average_sq.sqrt() / root_correction + EPSILON)
    if rest is None:
        weights.copy_(moved)
        return
    upper, lower = split(moved)
    weights.copy_(upper)
    rest.copy_(lower)


class ShardedAdamW:
    """AdamW on one drafter's shard: float32 masters, clipping and the finite check folded into the update.

    Everything stays on the device, at fixed addresses, so that an update is one CUDA graph. A step whose gradient
    is not finite changes nothing, nor does any later one, so that the state of the bad step is still there when
    the host learns of it, without a synchronisation.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        index: int,
        num_shards: int,
        config: OptimConfig,
        compile_function: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        device = parameters.device
        self.slice = parameters.layout.shard(index, num_shards)
        self.weights = parameters.weights[self.slice]
        self.rest: Tensor | None = None
        if parameters.weights.dtype == torch.bfloat16:
            self.rest = torch.empty(len(self.weights), dtype=torch.int16, device=device)
            for piece in pieces(len(self.weights)):
                start, stop = self.slice.start + piece.start, self.slice.start + piece.stop
                self.rest[piece].copy_(split(parameters.initial_masters(slice(start, stop)))[1])
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, len(self.weights), device=device).unbind()
        # a single drafter steps straight from its own sums
        self.gradient = parameters.gradients if num_shards == 1 else torch.zeros_like(self.exp_avg)
        self.lr, self.num_steps, self.found_inf, self.total_square_sum, self.total_weight = torch.zeros(
            5, device=device
        ).unbind()
        """Scalars. The totals are the inputs of `update`: over all shards, of the gradient before it is divided by
        the step's sum of slot weights."""
        self._config = config
        self._advance = adamw if compile_function is None else compile_function(adamw)
        size = len(self.weights)
        cut = min(max(parameters.layout.num_decayed - self.slice.start, 0), size)
        self._parts = [(slice(0, cut), config.weight_decay), (slice(cut, size), 0.0)]

    @contextmanager
    def withheld(self) -> Iterator[None]:
        """Updates inside change nothing: for warming up and capturing."""
        self.found_inf.fill_(1.0)
        yield
        self.found_inf.zero_()

    def square_sum(self) -> Tensor:
        """Sum of squares of the shard's gradient, float32 scalar."""
        return torch.linalg.vector_norm(self.gradient, dtype=torch.float32).square()

    @torch.no_grad()
    def update(self) -> Tensor:
        """Clip by the global norm and step; returns the gradient norm [] (not finite: nothing was changed)."""
        weight = self.total_weight.clamp_min(torch.finfo(torch.float32).tiny)
        norm = self.total_square_sum.sqrt() / weight
        self.found_inf.copy_(torch.maximum(self.found_inf, 1.0 - torch.isfinite(norm).float()))
        self.num_steps.add_(1.0 - self.found_inf)
        rates = self.rates(weight * (norm / self._config.clip_norm).clamp_min(1.0))
        for part, decay in self._parts:
            if part.start < part.stop:
                self._advance(
                    self.weights[part],
                    None if self.rest is None else self.rest[part],
                    self.exp_avg[part],
                    self.exp_avg_sq[part],
                    self.gradient[part],
                    rates,
                    decay,
                )
        return norm

    def rates(self, divisor: Tensor) -> Tensor:
        """The scalars of `adamw`: keep, gradient scale, 1 - beta1, 1 - beta2, lr, step size, root of the correction.

        A withheld step moves by nothing and towards nothing.
        """
        beta1, beta2 = self._config.betas
        keep = self.found_inf.double()
        going, steps = 1.0 - keep, self.num_steps.double().clamp_min(1.0)
        correction, correction_sq = 1.0 - beta1**steps, 1.0 - beta2**steps
        lr = torch.where(keep > 0, 0.0, self.lr.double())
        return torch.stack(
            [
                keep,
                1.0 / divisor.double(),
                (1.0 - beta1) * going,
                (1.0 - beta2) * going,
                lr,
                lr / correction,
                correction_sq.sqrt(),
            ]
        ).float()

    def state(self) -> dict[str, Tensor]:
        """Copies on the host: masters and moments of the shard, each float32 [shard], and the step count []."""
        host = {
            "exp_avg": self.exp_avg.to("cpu", copy=True),
            "exp_avg_sq": self.exp_avg_sq.to("cpu", copy=True),
            "step": self.num_steps.to("cpu", copy=True),
        }
        return {"master": self._master_on_host(), **host}

    def _master_on_host(self) -> Tensor:
        if self.rest is None:
            return self.weights.to("cpu", copy=True)
        parts = pieces(len(self.weights))
        return torch.cat([join(self.weights[part], self.rest[part]).cpu() for part in parts])

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Write a saved state to the existing addresses, so that captured graphs stay valid."""
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.num_steps.copy_(state["step"])
        for piece in pieces(len(self.weights)):
            master = state["master"][piece]
            if self.rest is None:
                self.weights[piece].copy_(master)
                continue
            upper, lower = split(master)
            self.weights[piece].copy_(upper)
            self.rest[piece].copy_(lower)


def pieces(size: int) -> Iterator[slice]:
    """Slices of at most `PIECE` elements that cover `size`."""
    return (slice(start, min(start + PIECE, size)) for start in range(0, size, PIECE))
