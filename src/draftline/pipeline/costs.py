"""What a row costs, counted from configurations alone: floating-point operations and weights, no tensor made.

Legend: S = context tokens of a row, A = blocks, B = block size, Q = A * B, D = hidden, I = MLP width, V = head
rows, K = taps, L = drafter layers, Hq / Hkv = query / key-value heads x head dim. The counts are those of a step
that does no more than it must (no weight gradient of the frozen head, its logits computed once).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftline.config import DrafterSpec
from draftline.target.forward import decoder_layers
from draftline.target.load import tables_of, text_config


@dataclass(frozen=True)
class TargetCost:
    """A target, counted on the meta device."""

    num_weights: int
    """Of the whole model; tied tables once."""
    head_weights: int
    """Which every drafter device holds."""
    active_weights: int
    """That one token passes in the layers up to the last tap; of mixtures, only the experts it is sent to."""
    attention_width: int
    """Sum of Hq over the attending layers up to the last tap."""
    widest: int
    """Largest number of intermediate values of one token in one layer."""

    def flops(self, tokens: int, document_tokens: float) -> float:
        """Of the forward over a row of `tokens` in documents of `document_tokens` on average, to the last tap."""
        return 2.0 * tokens * self.active_weights + 4.0 * self.attention_width * tokens * document_tokens / 2


def count_target(model: PreTrainedModel, target_layer_ids: tuple[int, ...]) -> TargetCost:
    """Count a target; only shapes are read, so a model on the meta device will do."""
    text = text_config(model.config)
    _, _, layers = decoder_layers(model)
    used = list(layers)[: max(target_layer_ids) + 1]
    share = _active_share(text)
    head = tables_of(model)[1]
    return TargetCost(
        num_weights=sum(p.numel() for p in model.parameters()) - (head.numel() if _twice(model) else 0),
        head_weights=head.numel(),
        active_weights=sum(_active(layer, share) for layer in used),
        attention_width=text.num_attention_heads * head_dim(text) * sum(_attends(layer) for layer in used),
        widest=max(_widest(layer, share) for layer in used),
    )


def _twice(model: PreTrainedModel) -> bool:
    """Whether a tied head is still a tensor of its own (transformers ties when it loads, not on meta)."""
    tied = bool(getattr(text_config(model.config), "tie_word_embeddings", False))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Module)
    return tied and isinstance(head, nn.Module) and head.weight is not embedding.weight


def _active_share(text: PreTrainedConfig) -> float:
    """Share of a mixture's experts that one token is sent to."""
    total = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / total if total and chosen else 1.0


def _active(layer: nn.Module, share: float) -> int:
    return round(
        sum(p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in layer.named_parameters())
    )


def _attends(layer: nn.Module) -> bool:
    """Whether scores are computed over all earlier tokens; recurrent layers pass none of them."""
    return any(name.endswith("self_attn") for name, _ in layer.named_children())


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one head of a target's attention."""
    text = text_config(config)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _widest(layer: nn.Module, share: float) -> int:
    """Outputs of all of a layer's linear maps for one token: an upper bound of what lives at one time."""
    return round(
        sum(
            module.out_features * (share if ".experts." in f".{name}" else 1.0)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        )
    )


@dataclass(frozen=True)
class DrafterCost:
    """A drafter's step over one row (paper arXiv 2602.06036; counted as in docs/speed.md)."""

    spec: DrafterSpec
    tokens: int
    """S"""
    blocks: int
    """A"""

    @property
    def num_weights(self) -> int:
        """Trained weights."""
        spec = self.spec
        norms = 2 * spec.hidden_size + 2 * spec.head_dim
        tap_projection = spec.num_taps * spec.hidden_size**2
        return (
            tap_projection + spec.num_layers * (self._layer_matrices() + norms) + 2 * spec.hidden_size
        )  # hidden_norm and norm

    def _layer_matrices(self) -> int:
        spec = self.spec
        attention = 2 * spec.hidden_size * (self.query_width + self.key_width)
        return attention + 3 * spec.hidden_size * spec.intermediate_size

    @property
    def query_width(self) -> int:
        """Hq"""
        return self.spec.num_heads * self.spec.head_dim

    @property
    def key_width(self) -> int:
        """Hkv"""
        return self.spec.num_kv_heads * self.spec.head_dim

    @property
    def largest_operands(self) -> int:
        """Values of the input, the output gradient and the weight of the linear map that has the most of them."""
        hidden, queries = self.spec.hidden_size, self.blocks * self.spec.block_size
        taps = (self.tokens, self.spec.num_taps * hidden)
        maps = [taps, (queries, self.query_width), (queries, self.spec.intermediate_size)]
        return max(rows * (width + hidden) + width * hidden for rows, width in maps)

    def flops(self, document_tokens: float) -> float:
        """Of forward and backward over one row whose documents have `document_tokens` on average."""
        spec, slots = self.spec, self.blocks * (self.spec.block_size - 1)
        queries = self.blocks * spec.block_size
        linear = spec.num_layers * (
            2.0 * queries * self._layer_matrices() + 2.0 * self.tokens * 2 * spec.hidden_size * self.key_width
        )
        taps = 2.0 * self.tokens * spec.num_taps * spec.hidden_size**2
        seen = document_tokens / 2 + spec.block_size
        attention = spec.num_layers * 4.0 * self.query_width * queries * seen
        head = 4.0 * slots * spec.hidden_size * spec.vocab_size
        return 3 * linear + 2 * taps + 3.5 * attention + head
