"""FlashAttention 4, the optional kernels of both sides on a Hopper GPU (`placement.attention: flash`).

The package `flash-attn-4` compiles its kernels when they are first called: before the workers start, while the target
is tested, or inside the gate. Nothing falls back from it: a machine that lacks something is refused before anything
long starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from draftline.config import DrafterSpec
from draftline.errors import ConfigError

HOPPER = 9
"""Major compute capability of the GPUs it was measured on; its block-sparse kernels differ on others."""
DRAFTER_HEADS = (64, 128)
"""Head sizes of a drafter whose results are right: some others give wrong gradients, see flash_proof.py."""
TARGET_MULTIPLE = 8
WIDEST_TARGET = 256
"""Head sizes of a target are multiples up to this, as for PyTorch's variable-length kernel; each target is tested on
itself at start."""
OR_FLEX = "or use placement.attention: flex"


def kernels() -> Any:
    """The package's module of kernels; its entries `_flash_attn_fwd` and `_flash_attn_bwd` are those PyTorch calls too.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise ConfigError(
            f"placement.attention=flash needs the package flash-attn-4, which cannot be imported ({error}); "
            f"pip install 'draftline[flash]', {OR_FLEX}"
        ) from None


def installed_version() -> str | None:
    """Of the package flash-attn-4, without importing it; None where it is not installed."""
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


def unused_flash(attention: str, head_dim: int, devices: Sequence[torch.device]) -> str | None:
    """A line for a person whose GPUs could use it and whose settings leave the choice open."""
    if attention != "auto" or head_dim not in DRAFTER_HEADS or installed_version() is None:
        return None
    if not all(d.type == "cuda" and torch.cuda.get_device_capability(d)[0] == HOPPER for d in devices):
        return None
    return (
        "flash-attn-4 is installed and not used: placement.attention=flash makes steps shorter, and two runs differ in "
        "their last bits (docs/speed.md); placement.attention=flex ends this note"
    )


def refuse_flash(
    spec: DrafterSpec, target_head_dim: int, drafter_dtype: torch.dtype, devices: Sequence[torch.device]
) -> None:
    """Refuse what FlashAttention 4 cannot be used for, before anything long starts.

    Args:
        target_head_dim: size of one head of the target.
        devices: where it will run; none when it is only counted.

    Raises:
        ConfigError: the compute type, a head size or a device does not fit, or the package cannot be imported.
    """
    if drafter_dtype == torch.float32:
        raise ConfigError(
            "placement.attention=flash computes in bfloat16, but placement.drafter_dtype is float32; leave "
            f"drafter_dtype out, {OR_FLEX}"
        )
    if spec.head_dim not in DRAFTER_HEADS:
        raise ConfigError(
            f"placement.attention=flash is for drafters with heads of {' or '.join(map(str, DRAFTER_HEADS))}, and this "
            f"one's are of {spec.head_dim}; set drafter.head_dim, {OR_FLEX}"
        )
    if target_head_dim % TARGET_MULTIPLE or target_head_dim > WIDEST_TARGET:
        raise ConfigError(
            f"placement.attention=flash takes targets whose heads are multiples of {TARGET_MULTIPLE} up to "
            f"{WIDEST_TARGET}, and this one's are of {target_head_dim}; use placement.attention: flex"
        )
    for device in dict.fromkeys(devices):
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != HOPPER:
            raise ConfigError(
                f"{device} has compute capability {capability[0]}.{capability[1]}, and placement.attention=flash is "
                f"for {HOPPER}.x (H100, H200); use such a GPU, {OR_FLEX}"
            )
    if devices:
        kernels()


@torch.library.custom_op("draftline::flash_packed", mutates_args=())
def flash_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of each document of a packed row to itself.

    Args:
        q: [tokens, H, hd].
        k, v: [tokens, KV, hd].
        cu_seqlens: bounds of the documents, int32 [documents + 1].
        longest: tokens of the longest document that may come.
        window: tokens that a query sees, itself included; None for all.

    Returns:
        [tokens, H, hd].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernels()._flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=window is None,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        out=out,
    )
    return out


@flash_packed.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    cu_seqlens: Tensor,  # noqa: ARG001
    longest: int,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    window: int | None,  # noqa: ARG001
) -> Tensor:
    return q.new_empty(q.shape)
