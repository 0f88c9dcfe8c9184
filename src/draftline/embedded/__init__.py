"""Targets, conversations and prompts that come with the package, so that everything works offline.

`tiny` and `hybrid` are chat models of this project's own, trained on the language of `grammar.py` by
`scripts/make_embedded.py`; the conversations are what `tiny` itself answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_HERE = Path(__file__).parent


EmbeddedName = Literal["tiny", "hybrid"]
EMBEDDED_NAMES: tuple[EmbeddedName, ...] = ("tiny", "hybrid")


def embedded_path(name: EmbeddedName) -> Path:
    """Folder of an embedded target, as `from_pretrained` of transformers takes it.

    `tiny` has eight layers of full attention (Qwen3), `hybrid` three layers of gated delta rule for each one
    of full attention (Qwen3.5). Both use the same tokenizer of 512 ids.
    """
    return _HERE / name


DEMO_TASKS = ("add", "letter")
"""Tasks of the demo's own data, two of ten: what a drafter can learn in a minute on two cores."""


def train_conversations(*, demo: bool = False) -> Path:
    """Chat JSONL (gzip) of training prompts with `tiny`'s own greedy answers, of all tasks or of the demo's."""
    return _HERE / ("demo_conversations.jsonl.gz" if demo else "conversations.jsonl.gz")


def unseen_prompts(*, demo: bool = False) -> Path:
    """Chat JSONL of prompts that no training conversation contains, each with the name of its task."""
    return _HERE / ("demo_test_prompts.jsonl" if demo else "test_prompts.jsonl")
