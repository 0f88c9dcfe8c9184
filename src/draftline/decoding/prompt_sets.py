"""The usual prompt sets by name, read from the hub or from a local copy of a hub repository.

Only the questions are used, never the answers: the target writes its own. The words around a question are
Draftline's, so acceptance lengths on a set compare between drafters measured here and only roughly with published
ones.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftline.errors import DataError

Turns = tuple[str, ...]
"""User turns of one prompt; the target answers each before it reads the next."""


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies and how a record of it becomes a prompt."""

    repository: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    """Columns that `turns` reads."""
    turns: Callable[[Mapping[str, Any]], Turns]


def _math(column: str) -> Callable[[Mapping[str, Any]], Turns]:
    return lambda row: (f"{row[column]}\n\nReason step by step and put the final answer in \\boxed{{}}.",)


def _function(row: Mapping[str, Any]) -> Turns:
    return (f"Complete this Python function.\n\n```python\n{row['prompt']}```",)


def _instruction(row: Mapping[str, Any]) -> Turns:
    return (f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"],)


SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", ("question",), _math("question")),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", ("problem",), _math("problem")),
    "humaneval": PromptSet("openai/openai_humaneval", None, "test", ("prompt",), _function),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp", "sanitized", "test", ("prompt",), lambda row: (row["prompt"],)
    ),
    "mt-bench": PromptSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",), lambda row: tuple(row["prompt"])
    ),
    "alpaca": PromptSet("tatsu-lab/alpaca", None, "train", ("instruction", "input"), _instruction),
}


def load_set(name: str, folder: str | None, count: int) -> list[Turns]:
    """`count` prompts of a set, evenly spread over it, because some sets are sorted by subject.

    Args:
        folder: a local copy of the set's hub repository; None reads the hub.

    Raises:
        DataError: the `datasets` package is missing, the set cannot be read, or it lacks a column.
    """
    wanted = SETS[name]
    rows = _load(wanted, name, folder)
    missing = [column for column in wanted.columns if column not in rows.column_names]
    if missing:
        raise DataError(
            f"{name}: {folder or wanted.repository} has no column {', '.join(missing)} (it has "
            f"{', '.join(rows.column_names)}); take a copy of {wanted.repository}"
        )
    total = len(rows)
    return [wanted.turns(rows[index * total // min(count, total)]) for index in range(min(count, total))]


def _load(wanted: PromptSet, name: str, folder: str | None) -> Any:
    try:
        from datasets import load_dataset  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415 - only named sets need it
    except ImportError:
        raise DataError(
            f"the set {name} is read by the `datasets` package: pip install datasets; or name a .jsonl or "
            ".parquet file of prompts"
        ) from None
    try:
        return load_dataset(folder or wanted.repository, wanted.config, split=wanted.split)
    except (OSError, ValueError, HfHubHTTPError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        where = folder or f"{wanted.repository} on the hub"
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"the set {name} cannot be read from {where}: {type(error).__name__}: {reason}. Without a network, "
            f"name a local copy of {wanted.repository} as {name}=FOLDER"
        ) from None
