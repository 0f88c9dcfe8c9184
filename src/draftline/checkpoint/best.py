"""`best.json`: which checkpoint had the best evaluation figure. That checkpoint is kept beyond retention."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from draftline.config import Frozen
from draftline.resilience.fsio import FileSystem, replace_bytes
from draftline.resilience.names import read_regular
from draftline.resilience.sealed import DamagedError, seal, unseal

BEST = "best.json"


class Best(Frozen):
    """The checkpoint with the highest figure so far."""

    step: int = Field(ge=0)
    figure: float
    """Evaluation figure, higher is better (mean acceptance length)."""


def read_best(root: Path) -> Best | None:
    """The recorded best, or None when nothing was evaluated yet.

    Raises:
        DamagedError: `best.json` is not what was written.
    """
    try:
        return Best.model_validate(unseal(read_regular(root, BEST, 4096), BEST))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DamagedError(f"{BEST}: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise DamagedError(f"{BEST}: {error}") from None


def write_best(fs: FileSystem, root: Path, best: Best) -> None:
    """Point at another checkpoint; durable on return."""
    replace_bytes(fs, root / BEST, seal(best.model_dump()))
