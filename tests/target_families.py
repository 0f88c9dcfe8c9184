"""Random targets of several families, and folders of them as a user has them on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, HIDDEN, NUM_LAYERS = 97, 32, 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,  # wide enough that every token moves every later one
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=8)),
    "hybrid": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **GATED_DELTA)),
}
PACKED = ("qwen3", "llama", "qwen3 moe", "gemma3")
BATCHED = ("gemma2", "hybrid")
"""Soft-capped scores, and recurrent layers: neither can be told where a document ends."""


@cache
def model(family: str) -> PreTrainedModel:
    """An untrained target in fp32; shared by all tests, which must not change it."""
    torch.manual_seed(0)
    return FAMILIES[family]().eval().requires_grad_(requires_grad=False)


@cache
def wide_model(family: str) -> PreTrainedModel:
    """The same in fp64, where it has kernels: what rounding adds in fp32 differs between processors, and the
    recurrent layers of these random weights enlarge it beyond any tolerance that would still find a fault."""
    wide = copy.deepcopy(model(family))
    return wide if "moe" in family else wide.double()


def tokenizer(num_tokens: int = VOCAB, **special: str) -> PreTrainedTokenizerFast:
    """Words `t0`, `t1`, ..; special tokens by role, such as `mask_token="t9"`."""
    words = {f"t{index}": index for index in range(num_tokens)}
    core = Tokenizer(WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def save_target(folder: Path, family: str = "qwen3") -> Path:
    """A folder as `save_pretrained` leaves it: config, weights in one file, tokenizer."""
    model(family).save_pretrained(folder)
    tokenizer(unk_token="t0").save_pretrained(folder)
    return folder
