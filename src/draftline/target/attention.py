"""Document-isolated attention for a target's packed row, registered with transformers by name.

Three kernels, chosen once when a worker is built and shown in the plan: PyTorch's variable-length attention
(CUDA, half precision), FlashAttention 4 in its place where the run asks for it, and SDPA with an explicit boolean
mask (CPU, or float32). All read the row's document bounds from a `Packing` that the worker owns, so nothing depends
on how a model family builds its masks (transformers' defaults leak across packed documents silently).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from draftline.flash import WIDEST_TARGET, flash_packed

ATTENTION_NAME = "draftline_packed"
Kernel = Literal["varlen", "flash", "mask"]
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""torch 2.11 takes grouped heads as they are; later versions want to be told."""


def choose_kernel(device: torch.device, dtype: torch.dtype, *, flash: bool) -> Kernel:
    """varlen or flash where their kernels exist (CUDA, half precision), the explicit mask elsewhere."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "mask"
    return "flash" if flash else "varlen"


@dataclass
class Packing:
    """Document bounds of the row in work; tensors keep their addresses for the life of a captured graph."""

    cu_seqlens: Tensor  # int32 [max_documents + 1], padded with the row's length
    document_ids: Tensor  # int32 [tokens]; -1 is padding
    max_document: int
    """Tokens of the longest document that may come."""
    kernel: Kernel
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Kernel "mask" only: boolean [tokens, tokens] for each sliding window, made on first use in a row."""

    def mask(self, window: int | None) -> Tensor:
        """True where a query may see a key: same document, not later, inside the window."""
        if window not in self.masks:
            index = torch.arange(self.document_ids.shape[0], device=self.document_ids.device)
            visible = (self.document_ids[:, None] == self.document_ids[None]) & (
                index[:, None] >= index[None]
            )
            if window is not None:
                visible &= index[:, None] - index[None] < window
            self.masks[window] = visible
        return self.masks[window]


class UnsupportedPackingError(Exception):
    """This attention uses something that packed rows cannot express; run documents as a batch instead."""


def attach(model: nn.Module, packing: Packing) -> None:
    """Give every attention module of one worker's model that worker's packing."""
    for module in model.modules():
        if hasattr(module, "num_key_value_groups") or module.__class__.__name__.endswith("Attention"):
            object.__setattr__(module, "draftline_packing", packing)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; returns [1, tokens, heads, head_dim].

    Raises:
        UnsupportedPackingError: soft-capped scores, attention sinks, a mask from the model, or heads of a size that
            the row's kernel does not compute.
    """
    if softcap is not None or s_aux is not None or attention_mask is not None or dropout:
        raise UnsupportedPackingError(
            "soft-capped scores, attention sinks and own masks need the batched form"
        )
    packing: Packing = module.draftline_packing  # pyright: ignore[reportAssignmentType]
    if packing.kernel != "mask":
        if not query.shape[-1] == value.shape[-1] <= WIDEST_TARGET:
            raise UnsupportedPackingError(
                f"packed rows take heads of up to {WIDEST_TARGET} with values as large, and this target has heads of "
                f"{query.shape[-1]} with values of {value.shape[-1]}"
            )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
        if packing.kernel == "flash":
            out = flash_packed(q, k, v, packing.cu_seqlens, packing.max_document, scaling, sliding_window)
        else:
            out = _varlen(packing, q, k, v, scaling, sliding_window)
        return out[None], None
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=packing.mask(sliding_window), scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _varlen(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    left = -1 if window is None else window - 1  # the window counts the current token
    out = varlen_attn(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_document,
        packing.max_document,
        scale=scaling,
        window_size=(left, 0),
        **GROUPED_HEADS,
    )
    assert isinstance(out, Tensor)
    return out


AttentionInterface.register(ATTENTION_NAME, packed_attention)
