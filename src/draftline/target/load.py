"""Load a target: any causal language model that transformers can build, from safetensors only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from draftline.config import TargetConfig
from draftline.embedded import EmbeddedName, embedded_path
from draftline.errors import CheckpointError, ConfigError

BUILTIN = "builtin:"
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Target:
    """A loaded target: eval mode, no gradients. V = head rows, D = hidden size."""

    name: str
    """What the user called it: a path, a hub name or builtin:NAME."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    embedding: Tensor  # [V, D] raw rows
    embedding_scale: float
    """Factor that the target itself lays on its embedding rows (Gemma: sqrt(D)), else 1."""
    head: Tensor  # [V, D]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device


def resolve_path(config: TargetConfig) -> str:
    """Folder or hub name behind `config.path`.

    Raises:
        ConfigError: an unknown builtin, or something that looks like a folder but is none.
    """
    if config.path.startswith(BUILTIN):
        return str(_builtin_folder(config.path.removeprefix(BUILTIN)))
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"target {folder} has no config.json; name a folder that transformers can load")
        _check_shards(folder)
        return str(folder)
    looks_local = folder.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") != 1
    if looks_local or folder.exists():
        raise ConfigError(
            f"target {config.path!r} is not a folder; give a model folder, a hub name (owner/name) or builtin:tiny"
        )
    return config.path


def _builtin_folder(name: str) -> Path:
    if name not in get_args(EmbeddedName):
        known = ", ".join(BUILTIN + known for known in get_args(EmbeddedName))
        raise ConfigError(f"there is no builtin target {name!r}; there are {known}")
    return embedded_path(name)


def _check_shards(folder: Path) -> None:
    """Find missing or cut weight files before any device work (the index is data from outside)."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for name in sorted(names):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names the shard {name!r}; a shard must be a plain file name in {folder}"
            )
        _check_safetensors(folder / name)


def _check_safetensors(path: Path) -> None:
    """Compare a safetensors file's length with what its header promises."""
    if not path.is_file():
        raise CheckpointError(
            f"target shard {path} is missing; download the target again (safetensors are needed)"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if not 0 < header_size <= size - 8:
            raise CheckpointError(f"target shard {path} is cut short in its header; download it again")
        header = json.loads(file.read(header_size))
    end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    if size != 8 + header_size + end:
        raise CheckpointError(
            f"target shard {path} has {size} bytes, its header promises {8 + header_size + end}; download it again"
        )


def read_target_config(config: TargetConfig) -> PreTrainedConfig:
    """The target's own configuration, checked to be a causal language model.

    Raises:
        ConfigError: nothing there, or not a decoder-only causal model.
    """
    path = resolve_path(config)
    try:
        target_config = AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"target {config.path!r} cannot be read: {reason}") from None
    architectures = target_config.architectures or []
    causal = any(name.endswith(CAUSAL_SUFFIXES) for name in architectures)
    if target_config.is_encoder_decoder or not causal:
        raise ConfigError(
            f"target {config.path!r} is {architectures or type(target_config).__name__}, not a causal decoder-only "
            "language model; a drafter needs one that continues text from left to right"
        )
    return target_config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language part of a configuration (multimodal models nest it)."""
    return config.get_text_config(decoder=True)


def resolve_dtype(requested: str, device: torch.device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Compute type of the target: as asked; auto is the checkpoint's on CUDA and float32 on a CPU."""
    if requested != "auto":
        dtype: torch.dtype = getattr(torch, requested)
        return dtype
    if device.type == "cpu":
        return torch.float32
    return checkpoint or torch.bfloat16


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    path = resolve_path(config)
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"target {config.path!r} has no usable tokenizer: {reason}") from None


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Load weights and tokenizer on `device`; the safetensors are checked first.

    Raises:
        ConfigError: see `read_target_config`; or the head has a bias, which a drafter cannot share.
        CheckpointError: a shard is missing or cut short.
    """
    target_config = read_target_config(config)
    arguments: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "use_safetensors": True,
        "dtype": resolve_dtype(config.dtype, device, target_config.dtype),
    }
    model = AutoModelForCausalLM.from_pretrained(resolve_path(config), **arguments)
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    return wrap_target(config.path, model, load_tokenizer(config))


def wrap_target(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Target:
    """Take embedding and head out of a loaded model.

    Raises:
        ConfigError: the head has a bias.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module) or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"target {name!r}: its output head is missing or has a bias, which drafters cannot share"
        )
    scale = embedding.scalar_embed_scale if hasattr(embedding, "scalar_embed_scale") else 1.0
    weight, head_weight = embedding.weight, head.weight
    assert isinstance(weight, Tensor)
    assert isinstance(head_weight, Tensor)
    return Target(name, model, tokenizer, weight.detach(), float(scale), head_weight.detach())
