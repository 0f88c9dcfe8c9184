"""Names inside a folder of checkpoints. Order comes from the step in a name, never from a file's time."""

from __future__ import annotations

import re
from pathlib import Path

TRASH = ".trash-"
"""Prefix of a retired checkpoint that is being deleted."""
QUARANTINE = "quarantine"
"""Folder for checkpoints that failed verification."""

_STEP = re.compile(r"step-(\d{6,})", re.ASCII)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:06d}"


def steps_in(root: Path) -> list[int]:
    """Steps of all checkpoints of a folder, ascending, whether they are good or not; none where there is no folder."""
    if not root.is_dir():
        return []
    matches = ((path.name, _STEP.fullmatch(path.name)) for path in root.iterdir())
    steps = [(name, int(match[1])) for name, match in matches if match]
    return sorted(step for name, step in steps if name == checkpoint_name(step))
