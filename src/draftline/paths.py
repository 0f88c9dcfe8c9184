"""Names inside a run's folder, and the builtin data sets."""

from __future__ import annotations

from draftline.embedded import train_conversations, unseen_prompts
from draftline.errors import ConfigError
from draftline.target.load import BUILTIN

EXPORT = "drafter"
"""The exported drafter of a finished run."""
STORE = "store"
"""The token store of a file that was prepared on the fly."""


BUILTIN_ALL, BUILTIN_DEMO = f"{BUILTIN}all", f"{BUILTIN}demo"
"""The builtin targets' conversations: all ten tasks, or the demo's three."""


def builtin_conversations(path: str) -> str:
    """The file behind `data.path`.

    Raises:
        ConfigError: a builtin name that does not exist.
    """
    return str(train_conversations(demo=_is_demo(path))) if path.startswith(BUILTIN) else path


def builtin_prompts(path: str) -> str:
    """The file behind `data.eval_path`.

    Raises:
        ConfigError: a builtin name that does not exist.
    """
    return str(unseen_prompts(demo=_is_demo(path))) if path.startswith(BUILTIN) else path


def _is_demo(path: str) -> bool:
    if path not in (BUILTIN_ALL, BUILTIN_DEMO):
        raise ConfigError(f"there are no builtin data {path!r}; there are {BUILTIN_ALL} and {BUILTIN_DEMO}")
    return path == BUILTIN_DEMO
