"""Turns a Llama model in a GGUF file into a transformers folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftline.checkpoint.files import CheckpointFileSystem
from draftline.errors import CheckpointError
from draftline.smollm2.gguf import GgufFile

MASK_TOKEN = "<|endoftext|>"  # noqa: S105 - a token of text
"""Ends documents in pretraining; a chat model never writes it."""

_CONTROL_TOKEN = 3
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MESSAGE = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
_MESSAGE_WITH_GENERATION = (
    "{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}"
    "{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}"
    "{{'\n'}}"
)


def convert(file: GgufFile, folder: Path) -> None:
    """Write a Llama model with a byte-level BPE tokenizer as a transformers folder in bfloat16.

    Raises:
        CheckpointError: a tensor or a metadata key is missing, or the chat template is not the known one.
    """
    folder.mkdir(parents=True)
    state = llama_state(file)
    CheckpointFileSystem().write_tensors(folder / "model.safetensors", state)
    config = llama_config(file, tied="lm_head.weight" not in state)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    build_tokenizer(file).save_pretrained(folder)


def llama_state(file: GgufFile) -> dict[str, torch.Tensor]:
    """All weights under their transformers names, bfloat16."""
    heads, kv_heads = (
        file.value("llama.attention.head_count", int),
        file.value("llama.attention.head_count_kv", int),
    )
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if "output.weight" in file.tensors:
        names["output"] = "lm_head"
    for layer in range(file.value("llama.block_count", int)):
        for stored, name in _LAYER_NAMES.items():
            names[f"blk.{layer}.{stored}"] = f"model.layers.{layer}.{name}"
    state = {}
    for stored, name in names.items():
        weight = file.tensor(f"{stored}.weight")
        if stored.endswith("attn_q"):
            weight = _halved_rope(weight, heads)
        elif stored.endswith("attn_k"):
            weight = _halved_rope(weight, kv_heads)
        state[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    return state


def _halved_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head: llama.cpp rotates neighbouring rows, transformers the two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def llama_config(file: GgufFile, tied: bool) -> dict[str, object]:
    """The content of config.json, with both forms of the rope settings."""
    theta = _short(file.value("llama.rope.freq_base", float))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.value("llama.vocab_size", int),
        "hidden_size": file.value("llama.embedding_length", int),
        "intermediate_size": file.value("llama.feed_forward_length", int),
        "num_hidden_layers": file.value("llama.block_count", int),
        "num_attention_heads": file.value("llama.attention.head_count", int),
        "num_key_value_heads": file.value("llama.attention.head_count_kv", int),
        "head_dim": file.value("llama.rope.dimension_count", int),
        "max_position_embeddings": file.value("llama.context_length", int),
        "rms_norm_eps": _short(file.value("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id", int),
        "dtype": "bfloat16",
    }


def _short(number: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer: byte-level BPE after splitting off every digit.

    The chat template is the file's own, with `{% generation %}` round the assistant's words.
    """
    tokens = file.value("tokenizer.ggml.tokens", list)
    pairs = (merge.partition(" ") for merge in file.value("tokenizer.ggml.merges", list))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type", np.ndarray)
    control = [tokens[i] for i in np.flatnonzero(types == _CONTROL_TOKEN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[file.value("tokenizer.ggml.bos_token_id", int)],
        eos_token=tokens[file.value("tokenizer.ggml.eos_token_id", int)],
        pad_token=tokens[file.value("tokenizer.ggml.padding_token_id", int)],
        unk_token=tokens[file.value("tokenizer.ggml.unknown_token_id", int)],
        mask_token=MASK_TOKEN,
        model_max_length=file.value("llama.context_length", int),
        clean_up_tokenization_spaces=False,
        chat_template=with_generation_tags(file.value("tokenizer.chat_template", str)),
    )


def with_generation_tags(template: str) -> str:
    """Mark in a ChatML template what the assistant wrote, so that training can tell.

    Raises:
        CheckpointError: the template does not write messages in the known way.
    """
    if template.count(_MESSAGE) != 1:
        raise CheckpointError(
            f"the GGUF's chat template does not contain {_MESSAGE}; convert a model that uses ChatML"
        )
    return template.replace(_MESSAGE, _MESSAGE_WITH_GENERATION)
