"""The drafter's linear maps with products in float8, by torchao; in training only.

The three products of a map (output, gradient of the input, gradient of the weight) read float8 copies of their
operands, e4m3 forward and e5m2 for gradients, each scaled by its largest value of this very row: no history, nothing
that waits for the host, nothing to save. Norms, attention and the frozen head compute as before, and so do masters,
AdamW, evaluation and decoding: what is saved is an ordinary drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from draftline.config import DrafterSpec, Linears
from draftline.drafter.model import Drafter, empty_drafter
from draftline.errors import ConfigError

MULTIPLE = 16
"""Both sizes of a map that a GPU multiplies in float8 are multiples of it."""
CAPABILITY = (8, 9)
"""Least compute capability with float8 products: Ada and Hopper."""
OR_WITHOUT = "or leave placement.drafter_linears out"


def set_linears(drafter: Drafter, linears: Linears) -> int:
    """Let a drafter's linear maps multiply as asked; its parameters stay the very same objects.

    Returns:
        How many maps multiply in float8.

    Raises:
        ConfigError: torchao cannot be imported.
    """
    if linears == "drafter_dtype":
        return 0
    torchao = _torchao(linears)
    torchao.convert_to_float8_training(
        drafter, config=torchao.Float8LinearConfig(emulate=linears == "float8_emulated")
    )
    return len(_maps(drafter))


def refuse_float8(linears: Linears, spec: DrafterSpec, devices: Sequence[torch.device]) -> None:
    """Refuse what float8 cannot be used for, before anything long starts.

    Args:
        devices: where drafters will compute; none when they are only counted.

    Raises:
        ConfigError: torchao cannot be imported, a device is too old, or a map has sizes that a GPU cannot multiply.
    """
    if linears == "drafter_dtype":
        return
    # emulation too: it stands for what a GPU would do
    for name, linear in _maps(empty_drafter(spec)).items():
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            raise ConfigError(
                f"placement.drafter_linears={linears} needs linear maps whose sizes are multiples of {MULTIPLE}, but "
                f"{name} maps {linear.in_features} to {linear.out_features}; change drafter.intermediate_size, "
                f"drafter.head_dim or the numbers of heads, {OR_WITHOUT}"
            )
    for device in devices:
        _refuse_old(device)
    if devices:
        _torchao(linears)


def _maps(drafter: Drafter) -> dict[str, nn.Linear]:
    return {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}


def _refuse_old(device: torch.device) -> None:
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise ConfigError(
            f"{device} has compute capability {capability[0]}.{capability[1]}, and float8 products need "
            f"{CAPABILITY[0]}.{CAPABILITY[1]}; use such a GPU, {OR_WITHOUT}"
        )


def _torchao(linears: Linears) -> Any:
    try:
        import torchao.float8  # noqa: PLC0415 - optional, and seconds of imports
    except ImportError as error:
        raise ConfigError(
            f"placement.drafter_linears={linears} needs torchao, which cannot be imported ({error}); "
            f"pip install torchao, {OR_WITHOUT}"
        ) from None
    return torchao.float8
