"""The drafter: a short Qwen3-style stack over block tokens that reads the target's tapped hidden states.

Parameter names and shapes are those of z-lab's published drafters (docs/serving.md), so a state dict is a
servable file. The token embedding and the head are the target's and are not part of the module.

`Drafter` is a backbone. Parts that other drafters of the family add have their places: convolutions wrap
`self_attn` and `mlp` inside `DrafterLayer.block`; a selector or a correction head follows `Drafter.forward`.

Legend: D = hidden size, K = taps, H / KV = query / key-value heads, hd = head dim, S = context tokens,
Q = block tokens. Everything is one row: there is no batch dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from draftline.config import DrafterSpec
from draftline.drafter.attention import Attend
from draftline.errors import ConfigError

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the angles at n positions, each fp32 [n, hd / 2]."""


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary position embedding of x [heads, n, hd], computed in fp32 or better, returned in x's dtype.

    The tables take no gradient.
    """
    turned: Tensor = _Rotation.apply(x, *rotary)  # pyright: ignore[reportAssignmentType]
    return turned


class _Rotation(torch.autograd.Function):
    """Backward is the rotation by the opposite angles; autograd's own would add up four terms for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(slopes[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (2, -1))  # [heads, n, 2, hd / 2]
    left, right = wide[..., :1, :], wide[..., 1:, :]
    is_right = torch.arange(2, device=x.device)[:, None] == 1
    # Not a concatenation of the turned halves: the compiler cannot compute one again, so that attention's backward
    # would keep every rotated query and key beside what it was rotated from.
    across = torch.where(is_right, left, -right)
    return (wide * cos[:, None] + across * sin[:, None]).flatten(-2).to(x.dtype)


class DrafterAttention(nn.Module):
    """Attention whose keys and values come from the context and from the block, through the same weights."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        hd = spec.head_dim
        self.head_dim = hd
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * hd, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * hd, spec.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(hd, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(hd, eps=spec.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[Q, D] -> normed and rotated queries [H, Q, hd]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[n, D] -> normed and rotated keys, and values, each [KV, n, hd]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return keys, self._heads(self.v_proj(x))

    def output(self, heads: Tensor) -> Tensor:
        """[H, Q, hd] -> [Q, D]."""
        return self.o_proj(heads.transpose(0, 1).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


class DrafterMLP(nn.Module):
    """Gated SiLU feed-forward layer, [Q, D] -> [Q, D]."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One layer. Context keys and values follow from the fused taps alone: decoding computes them once."""

    def __init__(self, spec: DrafterSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = DrafterAttention(spec)
        self.mlp = DrafterMLP(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def context_kv(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Fused context [S, D] -> keys and values [KV, S, hd]. The context passes no norm of the layer."""
        return self.self_attn.keys_values(context, rotary)

    def block(self, x: Tensor, context_kv: tuple[Tensor, Tensor], rotary: Rotary, attend: Attend) -> Tensor:
        """Block tokens x [Q, D] over context keys and values, each [KV, S, hd] -> [Q, D]."""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, rotary)
        heads = attend(
            self.index,
            self.self_attn.queries(normed, rotary),
            torch.cat([context_kv[0], keys], dim=1),
            torch.cat([context_kv[1], values], dim=1),
        )
        x = x + self.self_attn.output(heads)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash's drafter without embedding and head (paper arXiv 2602.06036, section 4).

    Raises:
        ConfigError: the shape cannot work (heads that do not divide, a window shorter than the block).
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        refuse_impossible_shapes(spec)
        self.spec = spec
        self.fc = nn.Linear(spec.num_taps * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(spec, index) for index in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices from N(0, 0.02), norms 1. Drawn on the CPU, so every device starts alike."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))

    def decoder_layers(self) -> Iterator[DrafterLayer]:
        """The layers in order."""
        return iter(cast("Iterable[DrafterLayer]", self.layers))

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [S, K*D] in the order of `target_layer_ids` -> context [S, D], shared by all layers."""
        return self.hidden_norm(self.fc(taps))

    def rotary(self, positions: Tensor) -> Rotary:
        """cos and sin in fp32 [n, hd / 2] of int64 positions [n]."""
        # Not a buffer: `.to(bfloat16)` would round the frequencies, which moves far positions by whole turns.
        even = torch.arange(0, self.spec.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / self.spec.rope_theta ** (even / self.spec.head_dim)
        angles = torch.outer(positions.float(), frequencies)
        return angles.cos(), angles.sin()

    def forward(
        self,
        block_embeds: Tensor,
        taps: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Final hidden states of the block tokens; the target's head turns them into logits.

        Args:
            block_embeds: [Q, D], the target's raw embedding rows x `input_embedding_scale`.
            taps: [S, K*D].
            context_positions: int64 [S].
            block_positions: int64 [Q].
            attend: attention over [S context | Q block] keys, see `attention.py`.

        Returns:
            [Q, D]; slot k of a block predicts the token at the anchor's position + k.
        """
        rotaries = self.rotary(context_positions), self.rotary(block_positions)
        return self.from_tables(block_embeds, taps, *rotaries, attend)

    def from_tables(
        self, block_embeds: Tensor, taps: Tensor, context_rotary: Rotary, block_rotary: Rotary, attend: Attend
    ) -> Tensor:
        """`forward` where the caller has made the tables of both kinds of positions with `rotary`."""
        context, x = self.fuse(taps), block_embeds
        for layer in self.decoder_layers():
            x = layer.block(x, layer.context_kv(context, context_rotary), block_rotary, attend)
        return self.norm(x)


def new_weights(spec: DrafterSpec, seed: int) -> dict[str, Tensor]:
    """Weights of an untrained drafter by name, float32 on the host; a function of shape and seed.

    Raises:
        ConfigError: see `Drafter`.
    """
    drafter = empty_drafter(spec).to_empty(device="cpu")
    drafter.init_weights(seed)
    return drafter.state_dict()


def drafter_of(spec: DrafterSpec, weights: Mapping[str, Tensor]) -> Drafter:
    """A drafter that computes with exactly these tensors, which are not copied.

    Raises:
        ConfigError: see `Drafter`.
        RuntimeError: PyTorch's list of missing and unused names and of shapes that differ.
    """
    drafter = empty_drafter(spec)
    drafter.load_state_dict(dict(weights), strict=True, assign=True)
    return drafter


def empty_drafter(spec: DrafterSpec) -> Drafter:
    """The structure alone, on the meta device: nothing is drawn and then thrown away."""
    with torch.device("meta"):
        return Drafter(spec)


def refuse_impossible_shapes(spec: DrafterSpec) -> None:
    """Find what no drafter can be built from; costs nothing.

    Raises:
        ConfigError: heads do not divide, or a window is shorter than the block.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}; "
            "query heads share key/value heads in equal groups"
        )
    if spec.head_dim % 2:
        raise ConfigError(f"head_dim={spec.head_dim} is odd; rotary positions turn pairs, use an even size")
    if len(spec.layer_types) != spec.num_layers:
        raise ConfigError(
            f"layer_types names {len(spec.layer_types)} layers but num_layers is {spec.num_layers}; "
            "name every layer once"
        )
    if "sliding_attention" in spec.layer_types and (spec.sliding_window or 0) < spec.block_size:
        raise ConfigError(
            f"sliding_window={spec.sliding_window} is shorter than block_size={spec.block_size}; "
            "a block must see itself whole, use a larger window"
        )
