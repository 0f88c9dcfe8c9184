"""The target's name in a card that may be published: a hub name, never a path of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from draftline.resilience.names import read_regular
from draftline.serving.measured import CARD

_MAX_BYTES = 2**24
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---", re.DOTALL)


def find_base_model(target: str | None, cards: Iterable[Path]) -> str | None:
    """The hub name of a drafter's target: as it was given, or else as a card of this drafter has it.

    A target's folder is not asked: what its config.json calls itself is what it was loaded from, which for a
    fine-tuned model is another model.

    Args:
        target: path or hub name that was given.
        cards: folders whose cards are about this drafter.
    """
    if target is not None and is_hub_name(target):
        return target
    return next((name for folder in cards if (name := base_model_in(folder))), None)


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
    return named if isinstance(named, str) and is_hub_name(named) else None
