"""What a command leaves on standard output: lines for a person, or exactly one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_YES = {"true", "t", "yes", "y", "1"}
"""As cyclopts reads a flag."""
_NAME = 24
"""Columns of a name in front of its value."""


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line, readable or not, asks for JSON: its last word on it counts, and none after `--`."""
    flags = words[: words.index("--")] if "--" in words else words
    said = [word.partition("=") for word in flags if word == "--json" or word.startswith("--json=")]
    return bool(said) and (said[-1][1] == "" or said[-1][2].lower() in _YES)


def json_document(values: Mapping[str, Any]) -> str:
    """One line of JSON that every reader takes: a number that is not finite, which JSON has not, becomes null."""
    return json.dumps(_finite(values), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return value


def readable(values: Mapping[str, Any]) -> list[str]:
    """Lines for a person: a name and its value, counts by reason below theirs, the most frequent first."""
    lines = list[str]()
    for name, value in values.items():
        shown = name.replace("_", " ")
        if not isinstance(value, Mapping) or not value:
            lines.append(f"{shown:{_NAME}} {_word(value)}")
            continue
        lines.append(shown)
        lines += [f"  {line}" for line in _below(value)]
    return lines


def _below(values: Mapping[str, Any]) -> list[str]:
    if all(isinstance(value, int) for value in values.values()):
        values = dict(sorted(values.items(), key=lambda item: -item[1]))
    lines = list[str]()
    for name, value in values.items():
        shown = str(name).replace("_", " ")
        if isinstance(value, Mapping) and value:
            lines += [f"{shown}:", *(f"  {line}" for line in _below(value))]
        else:
            lines.append(f"{shown}: {_word(value)}")
    return lines


def _word(value: Any) -> str:
    """A single value on a single line."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or value in ("", {}, [], ()):
        return "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_word, value))
    return " ".join(str(value).split())
