"""Random targets of several families, small enough for a CPU, and drafters that fit them.

A drafter can be taught a target's text in a second or two. It is then right now and then, so blocks are kept
in part, which is where a decoder can go wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftline.config import DrafterSpec
from draftline.decoding.greedy import CachedTarget, Limit, greedy
from draftline.drafter.blocks import block_token_ids
from draftline.drafter.model import Drafter
from draftline.target.load import Target, wrap_target
from tests.oracles.tiny import TinyRow, random_drafter, row_hidden

VOCABULARY = 11
MASK = 10
HIDDEN = 32
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
FAMILIES = ("qwen3", "llama", "gemma3", "hybrid")


def random_target(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """An untrained target with 6 layers; gemma3 has sliding layers, hybrid gated-delta ones."""
    torch.manual_seed(seed)
    model = _build(family).to(dtype).eval().requires_grad_(False)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))
    return wrap_target(f"random {family}", model, tokenizer)


def _build(family: str) -> Any:
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8))
    layers = ["linear_attention", "linear_attention", "full_attention"] * 2
    linear: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, layer_types=layers, **linear))


def fitting_spec(target: Target, **changes: object) -> DrafterSpec:
    """A two-layer drafter architecture for a random target."""
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "layer_types": ("full_attention", "full_attention"),
        "input_embedding_scale": target.embedding_scale,
    }
    return DrafterSpec(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def fitting_drafter(target: Target, seed: int = 0, **changes: object) -> Drafter:
    """A random drafter for a random target, in the target's dtype."""
    return random_drafter(fitting_spec(target, **changes), seed, target.embedding.dtype)


def taught_drafter(target: Target, steps: int = 40, **changes: object) -> Drafter:
    """A drafter after some AdamW steps on the target's answers to `random_prompts(3)`."""
    drafter = fitting_drafter(target, 0, **changes)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    texts = [(prompt, greedy(target, prompt, Limit(24))) for prompt in random_prompts(3)]
    lessons = [_lesson(target, drafter.spec, prompt, answer) for prompt, answer in texts]
    for step in range(steps):
        optimizer.zero_grad()
        _lesson_loss(drafter, target, lessons[step % len(lessons)]).backward()
        optimizer.step()
    return drafter.eval()


def _lesson(
    target: Target, spec: DrafterSpec, prompt: list[int], answer: list[int]
) -> tuple[TinyRow, Tensor]:
    """A text as a row with a block at each answer token that has a whole block after it, and labels."""
    text = torch.tensor([*prompt, *answer])
    anchors = torch.arange(len(prompt), len(text) - spec.block_size + 1)
    valid = torch.ones_like(anchors, dtype=torch.bool)
    with torch.no_grad():
        taps = CachedTarget(target, spec.target_layer_ids).feed(text, num_logits=1).taps
    ids = block_token_ids(text, anchors, valid, spec.mask_token_id, spec.block_size)
    row = TinyRow(
        lengths=(len(text),),
        positions=torch.arange(len(text)),
        document_ids=torch.zeros(len(text), dtype=torch.int32),
        anchors=anchors,
        anchor_valid=valid,
        taps=taps,
        block_embeds=target.embedding[ids.flatten()] * spec.input_embedding_scale,
    )
    return row, text[anchors[:, None] + torch.arange(1, spec.block_size)]


def _lesson_loss(drafter: Drafter, target: Target, lesson: tuple[TinyRow, Tensor]) -> Tensor:
    row, labels = lesson
    logits = row_hidden(drafter, row)[:, 1:] @ target.head.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 30 tokens, without the mask token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 31, (count,), generator=generator).tolist()
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]
