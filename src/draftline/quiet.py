"""What libraries say that helps nobody: torchao when it is imported, which transformers does wherever it is installed,
and FlashAttention 4 when it compiles.

torchao names each of its own kernels, for formats that Draftline does not use, which this machine cannot load, and
torch names torchao's outdated calls; FlashAttention 4's compiler names an argument of the package's own. Only these
are held back, as the log or the warnings that they are, and only by the command: a program that imports Draftline
keeps its log as it is.
"""

from __future__ import annotations

import logging
import warnings


class _Without(logging.Filter):
    """Drops messages that hold certain words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


_HELD_BACK = {
    "torchao": _Without("Failed to load"),
    "torch.utils._pytree": _Without("is an Enum subclass and is now natively supported"),
}
"""What is dropped, by its logger."""


def hold_back() -> None:
    """Call it before transformers is imported; a second call changes nothing."""
    for name, without in _HELD_BACK.items():
        logging.getLogger(name).addFilter(without)
    warnings.filterwarnings("ignore", r"Argument aux_data \(position \d+\) cannot be converted", UserWarning)
