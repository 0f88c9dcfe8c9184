"""The target's name in a card that may be published: a hub name, never a path of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from draftline.checkpoint.layout import checkpoint_name, steps_in
from draftline.checkpoint.manifest import read_manifest
from draftline.errors import CheckpointError
from draftline.resilience.folder import CHECKPOINTS
from draftline.resilience.names import read_regular
from draftline.resilience.sealed import DamagedError
from draftline.serving.measured import CARD

_MAX_BYTES = 2**24
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---", re.DOTALL)


def find_base_model(target: str | None, cards: Iterable[Path], source: Path) -> str | None:
    """The hub name of a drafter's target, None when nothing tells it.

    In this order: the target itself, the cards, what the target's folder calls itself, then the run's target.

    Args:
        target: path or hub name that was given.
        cards: folders whose cards are about this drafter.
        source: folder that the drafter is read from, which may lie in a run.
    """
    if target is not None and is_hub_name(target):
        return target
    told = next((name for folder in cards if (name := base_model_in(folder))), None)
    return told or (_named_in_config(target) if target is not None else None) or _target_of_run(source)


def is_hub_name(path: str) -> bool:
    """Whether a target's path is OWNER/NAME and no folder here."""
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).is_dir()


def publishable(target: str) -> str:
    """What a card may call a target: its hub name or builtin name, or its folder's name without the path."""
    folder = Path(target).expanduser()
    return folder.resolve().name if folder.is_dir() else target


def base_model_in(folder: Path) -> str | None:
    """The hub name in the front matter of a folder's card; paths and placeholders are none."""
    try:
        matter = _FRONT_MATTER.match(read_regular(folder, CARD, _MAX_BYTES).decode())
        fields = yaml.safe_load(matter[1]) if matter else None
    except (OSError, ValueError, yaml.YAMLError):  # not there, a link, or not readable: it names nothing
        return None
    named = fields.get("base_model") if isinstance(fields, dict) else None
    if isinstance(named, list):  # hubs take several
        named = named[0] if named else None
    return _only_hub_name(named)


def _named_in_config(target: str) -> str | None:
    """What a target's folder says that it was loaded from."""
    try:
        config = json.loads(read_regular(Path(target).expanduser(), "config.json", _MAX_BYTES))
    except (OSError, ValueError):  # a builtin name, or a folder that has moved since
        return None
    return _only_hub_name(config.get("_name_or_path")) if isinstance(config, dict) else None


def _only_hub_name(named: Any) -> str | None:
    return named if isinstance(named, str) and is_hub_name(named) else None


def _target_of_run(source: Path) -> str | None:
    """Hub name of the target of the run that a checkpoint or an exported drafter lies in."""
    checkpoints = source.parent / CHECKPOINTS
    steps = steps_in(checkpoints)
    folder = checkpoints / checkpoint_name(max(steps)) if steps else source
    try:
        target = read_manifest(folder).config.get("target")
    except (OSError, ValueError, CheckpointError, DamagedError):  # no checkpoint, or a damaged one
        return None
    path = target.get("path") if isinstance(target, dict) else None
    if not isinstance(path, str):
        return None
    if not is_hub_name(path):
        return _named_in_config(path)
    # a/b may also have been a folder, seen from where the run was started; what the hub gave is in its cache
    return path if isinstance(try_to_load_from_cache(path, "config.json"), str) else None
