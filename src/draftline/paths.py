"""Names inside a run's folder, and the builtin data sets."""

from __future__ import annotations

from draftline.embedded import test_prompts, train_conversations
from draftline.target.load import BUILTIN

CHECKPOINTS = "checkpoints"
EXPORT = "drafter"
"""The exported drafter of a finished run."""
STORE = "store"
"""The token store of a file that was prepared on the fly."""


def builtin_conversations(path: str) -> str:
    """The file behind `data.path`; every builtin target has the same conversations."""
    return str(train_conversations()) if path.startswith(BUILTIN) else path


def builtin_prompts(path: str) -> str:
    """The file behind `data.eval_path`."""
    return str(test_prompts()) if path.startswith(BUILTIN) else path
