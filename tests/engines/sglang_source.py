"""SGLang's own DFlash model file on a CPU, without SGLang: what it imports is replaced by plain PyTorch.

The two files that decide what a checkpoint means, `models/dflash.py` (weight names, shapes, forward) and
`speculative/dflash_utils.py` (configuration keys), run unchanged from an unpacked wheel. Kernels and parallelism
are replaced; anything else they import is an empty name that must not be reached.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

REAL = ("sglang.srt.models.dflash", "sglang.srt.speculative.dflash_utils")


class Linear(nn.Module):
    """A linear layer that returns (output, bias), as SGLang's do, and can be loaded in shards."""

    def __init__(self, inputs: int, sizes: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(sizes), inputs), requires_grad=False)
        self.bias = None
        self.quant_method = Unquantized()
        order: dict[str | int | None, int] = {"q": 0, "k": 1, "v": 2, 0: 0, 1: 1, None: 0}

        def load(parameter: Tensor, loaded: Tensor, shard: str | int | None = None) -> None:
            place = parameter.split(sizes)[order[shard]]
            assert place.shape == loaded.shape, f"{tuple(loaded.shape)} into {tuple(place.shape)}"
            place.copy_(loaded)

        self.weight.weight_loader = load  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class Unquantized:
    """Marks a layer as not quantised."""


def qkv_linear(hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, **_: Any):
    key = total_num_kv_heads * head_size
    return Linear(hidden_size, [total_num_heads * head_size, key, key])


def merged_linear(inputs: int, sizes: list[int], **_: Any) -> Linear:
    return Linear(inputs, sizes)


def row_linear(inputs: int, outputs: int, **_: Any) -> Linear:
    return Linear(inputs, [outputs])


class FusedRMSNorm(nn.Module):
    """RMSNorm that can add a residual first, as SGLang's does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        normed = F.rms_norm(total, (total.shape[-1],), self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Rope(nn.Module):
    """Neox-style rotary embedding of flat [tokens, heads * head_dim] queries and keys."""

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._turn(positions, q), self._turn(positions, k)

    def _turn(self, positions: Tensor, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = self.base ** (-torch.arange(half).float() / half)
        angles = torch.outer(positions.float(), frequencies)[:, None]  # [tokens, 1, half]
        left, right = x.unflatten(-1, (-1, self.head_dim)).split(half, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(1)


def get_rope(head_dim: int, *, rotary_dim: int, base: float, rope_scaling: Any, **options: Any) -> Rope:
    assert rotary_dim == head_dim
    assert options["is_neox_style"]
    assert options["partial_rotary_factor"] == 1.0
    assert (rope_scaling or {}).get("rope_type", "default") == "default"
    return Rope(head_dim, base)


def get_rope_config(config: Any) -> tuple[float, Any]:
    parameters = config.rope_parameters
    return parameters["rope_theta"], parameters


def apply_qk_norm(
    q: Tensor, k: Tensor, q_norm: nn.Module, k_norm: nn.Module, head_dim: int, **_: Any
) -> tuple[Tensor, Tensor]:
    normed = (norm(x.unflatten(-1, (-1, head_dim))) for norm, x in ((q_norm, q), (k_norm, k)))
    q, k = (x.flatten(1) for x in normed)
    return q, k


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(nn.Module):
    """Attention of a block over context keys and values that `hold` was given.

    DECODER looks back only, ENCODER_ONLY both ways; a window counts tokens to the left of the query.
    """

    def __init__(self, *, scaling: float, sliding_window_size: int, attn_type: AttentionType, **sizes: Any):
        super().__init__()
        self.heads, self.kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
        self.head_dim, self.layer_id = sizes["head_dim"], sizes["layer_id"]
        self.scaling, self.window, self.kind = scaling, sliding_window_size, attn_type
        self.keys = self.values = torch.empty(0)

    def hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, _batch: Any) -> Tensor:
        keys, values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        place = torch.arange(len(keys))
        query = place[-len(q) :, None]
        mask = torch.ones(len(q), len(keys), dtype=torch.bool)
        if self.kind is AttentionType.DECODER:
            mask &= place <= query
        if self.window >= 0:
            mask &= place >= query - self.window
        heads = [x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for x in (q, keys, values)]
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=self.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def no_compile(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


REPLACED: dict[str, Any] = {
    "QKVParallelLinear": qkv_linear,
    "MergedColumnParallelLinear": merged_linear,
    "RowParallelLinear": row_linear,
    "UnquantizedLinearMethod": Unquantized,
    "RMSNorm": FusedRMSNorm,
    "SiluAndMul": SiluAndMul,
    "get_rope": get_rope,
    "get_rope_config": get_rope_config,
    "apply_qk_norm": apply_qk_norm,
    "AttentionType": AttentionType,
    "RadixAttention": RadixAttention,
    "LogitsProcessorOutput": SimpleNamespace,
    "default_weight_loader": lambda parameter, loaded: parameter.copy_(loaded),
    "get_parallel": lambda: SimpleNamespace(tp_size=1),
    "is_npu": lambda: False,
    "get_compiler_backend": lambda: "eager",
    "set_weight_attrs": lambda tensor, attributes: [setattr(tensor, *item) for item in attributes.items()],
    "DraftParallelSpec": SimpleNamespace,
    "DraftTPExecution": SimpleNamespace(SINGLE_GROUP=0),
}


class _Empty(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return REPLACED.get(name, type(name, (), {}))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if not fullname.startswith("sglang"):
            return None
        if fullname in REAL:
            return importlib.util.spec_from_file_location(
                fullname, self.source.joinpath(*fullname.split(".")).with_suffix(".py")
            )
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_sglang(source: Path) -> tuple[ModuleType, str]:
    """SGLang's DFlash model module from an unpacked wheel, and the wheel's version."""
    finder = _Finder(source)
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(REAL[0])
    finally:
        sys.meta_path.remove(finder)
    wheel = next(source.glob("sglang-*.dist-info"), None)
    return module, wheel.name.removeprefix("sglang-").removesuffix(".dist-info") if wheel else "unknown"


@torch.no_grad()
def load_poisoned(module: ModuleType, folder: Path) -> nn.Module:
    """SGLang's model with a folder's configuration and weights; NaN wherever the folder gave it nothing."""
    model = module.DFlashDraftModel(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


@torch.no_grad()
def sglang_block(model: nn.Module, block_embeds: Tensor, taps: Tensor) -> Tensor:
    """Hidden states [B, D] of one block after `taps` [S, K*D], the way SGLang's worker feeds its model."""
    sglang: Any = model
    context, positions = sglang.project_target_hidden(taps), torch.arange(len(taps) + len(block_embeds))
    for layer in sglang.layers:
        attention = layer.self_attn
        keys, values = attention.kv_proj_only(sglang.prepare_context_hidden_for_kv(layer, context))
        keys = attention.apply_k_rope(positions[: len(taps)], attention.apply_k_norm(keys))
        attention.attn.hold(keys, values)
    output = sglang(None, positions[len(taps) :], None, input_embeds=block_embeds)
    return output.hidden_states
