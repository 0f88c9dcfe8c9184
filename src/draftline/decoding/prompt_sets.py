"""The usual prompt sets by name, read from the hub or from a local copy of a hub repository.

Only the questions are used, never the answers: the target writes its own. The words around a question are
Draftline's, so acceptance lengths on a set compare between drafters measured here and only roughly with published
ones.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import DataError

_DATA_FILES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")

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
        from datasets.exceptions import DatasetsError  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415 - only named sets need it
    except ImportError:
        raise DataError(
            f"the set {name} is read by the `datasets` package: pip install datasets; or name a .jsonl or "
            ".parquet file of prompts"
        ) from None
    try:
        return load_dataset(folder or wanted.repository, wanted.config, split=wanted.split)
    except (OSError, ValueError, HfHubHTTPError, DatasetsError) as error:
        # a damaged file or a full disk is the cause of "An error occurred while generating the dataset"
        cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            raise cause from None
        reason = str(cause).strip().partition("\n")[0].rstrip(".")
        words = f"{type(cause).__name__}: {reason}"
        if folder is not None:
            fault = _lacking(wanted, Path(folder)) or words
            raise DataError(
                f"the set {name} cannot be read from {folder}: {fault}. {_copy_of(wanted, name)}"
            ) from None
        raise DataError(
            f"the set {name} cannot be read from {wanted.repository} on the hub: {words}. Without a network, "
            f"name a local copy of {wanted.repository} as {name}=FOLDER"
        ) from None


def _lacking(wanted: PromptSet, folder: Path) -> str:
    """What a folder lacks to be a copy of a set; empty where it has all that can be seen from outside."""
    if not folder.is_dir():
        return "it is a file, not a folder" if folder.exists() else "there is no such folder"
    lacking: list[str] = []
    if not any(file.name.endswith(_DATA_FILES) for file in folder.rglob("*")):
        lacking.append("no data file")
    card = folder / "README.md"
    if wanted.config and not (card.is_file() and _names_config(card, wanted.config)):
        lacking.append(f"no README.md that names the configuration {wanted.config!r}")
    return f"it has {' and '.join(lacking)}" if lacking else ""


def _names_config(card: Path, config: str) -> bool:
    text = card.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"config_name:\s*[\"']?{re.escape(config)}\b", text) is not None


def _copy_of(wanted: PromptSet, name: str) -> str:
    named = f", named by its README.md for the configuration {wanted.config!r}" if wanted.config else ""
    kinds = ", ".join(_DATA_FILES)
    return (
        f"A copy of {wanted.repository} has data files ({kinds}) of the split {wanted.split!r}{named}; fetch one by "
        f"hf download {wanted.repository} --repo-type dataset --local-dir FOLDER, then name it as {name}=FOLDER"
    )
