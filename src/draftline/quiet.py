"""What is said when torchao is imported, which transformers does wherever it is installed: it helps nobody.

torchao names each of its own kernels, for formats that Draftline does not use, which this machine cannot load, and
torch names torchao's outdated calls. Only these are held back, at the loggers that they come from.
"""

from __future__ import annotations

import logging

HELD_BACK = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}
"""Words of a message by its logger."""


class _Without(logging.Filter):
    """Drops messages that hold certain words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


def hold_back() -> None:
    """Call it before transformers is imported."""
    for name, words in HELD_BACK.items():
        logging.getLogger(name).addFilter(_Without(words))
