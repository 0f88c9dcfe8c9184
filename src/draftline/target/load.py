"""Load a target: any causal language model that transformers can build, from safetensors only."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from draftline.config import TargetConfig
from draftline.console import Screen
from draftline.embedded import EMBEDDED_NAMES, embedded_path
from draftline.errors import CheckpointError, ConfigError
from draftline.target.notices import say_missing_kernels, without_load_report
from draftline.target.shards import check_shards

BUILTIN = "builtin:"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
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
        return str(folder)
    looks_local = folder.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") != 1
    if looks_local or folder.exists():
        raise ConfigError(
            f"target {config.path!r} is not a folder; give a model folder, a hub name (owner/name) or builtin:tiny"
        )
    return config.path


def require_weights(config: TargetConfig) -> None:
    """Find weight files of a local target that are missing or cut short; reads their headers only.

    Raises:
        ConfigError: see `resolve_path`.
        CheckpointError: names the file and what is wrong with it.
    """
    folder = Path(resolve_path(config))
    if folder.is_dir():
        check_shards(folder)


def _builtin_folder(name: str) -> Path:
    for known in EMBEDDED_NAMES:
        if name == known:
            return embedded_path(known)
    raise ConfigError(
        f"there is no builtin target {name!r}; there are {', '.join(BUILTIN + n for n in EMBEDDED_NAMES)}"
    )


def read_target_config(config: TargetConfig) -> PreTrainedConfig:
    """The target's own configuration, checked to be a causal language model.

    Raises:
        ConfigError: nothing there, or not a decoder-only causal model.
    """
    path = resolve_path(config)
    with _explained(config, "cannot be read"):
        target_config = AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
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


def torch_dtype(named: Any) -> torch.dtype | None:
    """The type of a checkpoint's configuration, which may be its name."""
    return getattr(torch, named) if isinstance(named, str) else named


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    path = resolve_path(config)
    missing = [name for name in TOKENIZER_FILES if Path(path).is_dir() and not (Path(path) / name).is_file()]
    without = f" (it has no {' and no '.join(missing)}: copy them from the original model)" if missing else ""
    with _explained(config, f"has no usable tokenizer{without}"):
        # without a hub, a tokenizer is looked for twice, each time with a round of retries
        cached_file(path, "config.json", revision=config.revision)
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    # without files, transformers makes an empty tokenizer of the family and says nothing
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(
            f"target {config.path!r} has no tokenizer files; copy {' and '.join(TOKENIZER_FILES)} into it"
        )
    return tokenizer


@contextmanager
def _explained(config: TargetConfig, what: str) -> Iterator[None]:
    """Turn what transformers says of a target into one sentence with the fix.

    Raises:
        ConfigError: instead of any OSError or ValueError but a full disk.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"target {config.path!r} {what}: {_reason(config, error)}") from None


def _reason(config: TargetConfig, error: OSError | ValueError) -> str:
    said = " ".join(str(error).split())  # its lists and fixes follow in later lines
    if "trust_remote_code" in said and not config.trust_remote_code:
        return (
            "it needs code of its own (auto_map), which is not run unasked. Read that code, then set "
            "target.trust_remote_code=true and target.revision to the 40-digit commit that you have read"
        )
    if isinstance(error.__cause__, LocalEntryNotFoundError | OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached"
        return (
            f"{why} and the model is not in the hub's cache. Where there is a network, download it first: "
            f"hf download {config.path} --local-dir FOLDER; then set target.path=FOLDER (HF_HUB_OFFLINE=1 keeps a "
            "run from asking the hub for anything)"
        )
    return said


def sketch_target(config: TargetConfig) -> Target:
    """The target on the meta device: its shapes and its embedding's scale, without one weight.

    Raises:
        ConfigError: see `read_target_config`, `load_tokenizer` and `wrap_target`.
    """
    model = build_model(config, read_target_config(config), torch.device("meta"))
    return wrap_target(config.path, model, load_tokenizer(config))


def build_model(
    config: TargetConfig,
    target_config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A model in a target's shape with the weights that it would be trained from; no file of weights is read.

    Raises:
        ConfigError: transformers cannot build it, or it needs code of its own that was not asked for.
    """
    # transformers takes a pinned revision only when it imports the code, once a process; later it passes it on
    known = type(target_config) in AutoModelForCausalLM._model_mapping
    own_code = (
        not known
        and config.trust_remote_code
        and "AutoModelForCausalLM" in (getattr(target_config, "auto_map", None) or {})
    )
    arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if own_code:
        arguments["code_revision"] = config.revision
    if dtype is not None:
        arguments["dtype"] = dtype
    with device, _explained(config, "cannot be built"):
        return AutoModelForCausalLM.from_config(target_config, **arguments)


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Load weights and tokenizer on `device`; the safetensors are checked first.

    Raises:
        ConfigError: see `read_target_config`; or the head has a bias, which a drafter cannot share.
        CheckpointError: a shard is missing or cut short, or a weight is in none of them.
    """
    target_config = read_target_config(config)
    require_weights(config)
    arguments: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "use_safetensors": True,
        "dtype": resolve_dtype(config.dtype, device, torch_dtype(target_config.dtype)),
        "ignore_mismatched_sizes": True,  # they are refused below, by name
        "output_loading_info": True,
    }
    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log, each of its states is a line
    say_missing_kernels(device)
    with _explained(config, "cannot be loaded"), without_load_report():
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_path(config), **arguments)
    model, loading = loaded
    _refuse_unset_weights(
        config.path, [*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])]
    )
    _say_unused_weights(config.path, sorted(loading["unexpected_keys"]))
    nn.Module.to(model, device)
    model.eval().requires_grad_(requires_grad=False)
    return wrap_target(config.path, model, load_tokenizer(config))


def _refuse_unset_weights(name: str, unset: list[str]) -> None:
    """transformers fills weights that no file holds with random numbers and goes on with a warning."""
    if unset:
        raise CheckpointError(
            f"target {name!r} lacks {len(unset)} weights that its config.json asks for, or has them in another "
            f"shape ({_some(sorted(unset))}); download it again, or correct config.json"
        )


def _say_unused_weights(name: str, unused: list[str]) -> None:
    """Not an error: some checkpoints carry heads that their own model does not build."""
    if unused:
        Screen().say(
            f"target {name!r}: {len(unused)} weights of its files are not used ({_some(unused)}); if you know of no "
            "reason, its config.json belongs to another checkpoint"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def wrap_target(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Target:
    """Take embedding and head out of a loaded model.

    Raises:
        ConfigError: the head has a bias.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"target {name!r}: its output head is missing or has a bias, which drafters cannot share"
        )
    scale: Any = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)  # Gemma's embedding only
    embedding, head_weight = tables_of(model)
    return Target(name, model, tokenizer, embedding, float(scale), head_weight)


def tables_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, D] of a model; one tensor twice where they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Module)
    assert isinstance(head, nn.Module)
    assert isinstance(embedding.weight, Tensor)
    assert isinstance(head.weight, Tensor)
    return embedding.weight.detach(), head.weight.detach()
