"""The file of figures that the checks write: one line a row."""

from __future__ import annotations

import json
from typing import Any


def as_json(found: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    head = json.dumps({name: value for name, value in found.items() if name != "rows"})
    rows = ",\n  ".join(json.dumps(row) for row in found["rows"])
    return f'{head[:-1]},\n "rows": [\n  {rows}\n ]}}\n'
