"""Read a drafter's folder: ours, z-lab's, TorchSpec's or speculators'. Strict, and safe for any file.

Only JSON and safetensors are read, from plain file names inside the folder. Every tensor must be known and
present with its shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftline.checkpoint.layout import checkpoint_name, steps_in
from draftline.config import DrafterSpec
from draftline.data.fingerprint import hash_tokenizer
from draftline.drafter.model import Drafter, drafter_of, empty_drafter
from draftline.errors import CheckpointError, ConfigError
from draftline.paths import EXPORT
from draftline.resilience.folder import CHECKPOINTS
from draftline.resilience.names import UnsafeNameError, plain_name, read_regular
from draftline.serving.published import spec_from_config
from draftline.target.load import Target, text_config

CONFIG = "config.json"
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 16 * 2**20

RENAMED = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}
"""Beginnings of TorchSpec's and AngelSpec's names, and z-lab's."""
OF_THE_TARGET = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""Copies of frozen target weights that other trainers save along."""


def find_drafter(path: Path) -> Path:
    """The folder with config.json and model.safetensors that a run, checkpoint or drafter folder stands for.

    Raises:
        ConfigError: there is none.
    """
    if (path / "config.json").is_file():
        return path
    if (path / EXPORT / "config.json").is_file():
        return path / EXPORT
    checkpoints = path / CHECKPOINTS
    steps = steps_in(checkpoints)
    if not steps:
        raise ConfigError(
            f"{path} is neither a drafter, a checkpoint nor a run folder with one of them; one on the hub is "
            "fetched first: hf download OWNER/NAME --local-dir FOLDER"
        )
    return checkpoints / checkpoint_name(max(steps))


def load_drafter(folder: Path, num_target_layers: int | None = None) -> tuple[DrafterSpec, Drafter]:
    """A drafter's architecture and the drafter itself, on the CPU, in the dtype of the file.

    Args:
        folder: holds `config.json` and safetensors.
        num_target_layers: of the target, where the format does not tell it (TorchSpec, speculators).

    Raises:
        CheckpointError: a file is missing, unsafe or damaged; a key is missing or asks for what this version
            does not compute; a tensor is missing, unused or of another shape.
    """
    config = _read_json(folder, CONFIG)
    spec = spec_from_config(config, str(folder / CONFIG), num_target_layers)
    tensors = match_tensors(spec, _canonical(_read_tensors(folder)), str(folder))
    drafter = drafter_of(spec, tensors)
    return spec, drafter.requires_grad_(requires_grad=False).eval()


def refuse_misfit(spec: DrafterSpec, target: Target) -> None:
    """Make sure that a drafter was made for a target of this shape with this tokenizer.

    Raises:
        CheckpointError: hidden size, vocabulary, layers or tokenizer differ; every difference is named.
    """
    rows, hidden = target.head.shape
    layers = text_config(target.model.config).num_hidden_layers
    pairs = {
        "hidden size": (spec.hidden_size, hidden),
        "vocabulary rows": (spec.vocab_size, rows),
        "target layers": (spec.num_target_layers, layers),
    }
    differences = [
        f"{name} {ours} against {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs
    ]
    if not 0 <= spec.mask_token_id < rows:
        differences.append(f"mask token {spec.mask_token_id} is no row of {rows}")
    if spec.tokenizer_sha256 not in (None, found := hash_tokenizer(target.tokenizer)):
        differences.append(f"tokenizer {str(spec.tokenizer_sha256)[:12]} against {found[:12]} (sha256)")
    if differences:
        raise CheckpointError(
            f"this drafter was made for another target than {target.name}: {', '.join(differences)}; "
            "use the target that it was trained on"
        )


def match_tensors(spec: DrafterSpec, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The tensors of a spec in its order.

    Raises:
        CheckpointError: some are missing, unused or of another shape; all are listed.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in empty_drafter(spec).state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    unused = [name for name in tensors if name not in expected]
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    found = {"missing": missing, "unused": unused, "of another shape": shapes}
    complaints = [f"{kind}: {', '.join(names)}" for kind, names in found.items() if names]
    if complaints:
        raise CheckpointError(
            f"{source} does not hold the tensors of its configuration; {'; '.join(complaints)}. "
            "Nothing was loaded; use the folder as its trainer wrote it"
        )
    return {name: tensors[name] for name in expected}


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        known = next(
            (new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)), name
        )
        if known not in OF_THE_TARGET:
            renamed[known] = tensor
    return renamed


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(folder, name, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}; name a drafter's folder") from None
    except (OSError, ValueError) as error:  # an unsafe name and broken JSON are ValueErrors
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name} holds {type(value).__name__}, not a JSON object")
    return value


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    names = {MODEL}
    if (folder / INDEX).exists():
        weight_map = _read_json(folder, INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        names = {str(name) for name in weight_map.values()}
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        tensors.update(_read_safetensors(folder, name))
    return tensors


def _read_safetensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        path = folder / plain_name(name)
        if path.is_symlink() or not path.is_file():
            raise UnsafeNameError(f"{name} is missing or not a regular file")
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, UnsafeNameError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}; the drafter's weights cannot be read") from None
