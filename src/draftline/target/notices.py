"""What transformers writes to the screen about a target, where Draftline says it better or it helps nobody.

Only the two notices named here are held back, at the loggers that they come from; everything else is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _LoadReport(logging.Filter):
    """The table of weights that are missing, unused or of another shape, each of which `load_target` reports. What
    could not be converted stays: the error refers to the table."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text


class _ReferenceKernels(logging.Filter):
    """The advice to install kernels that exist for CUDA only."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "is falling back to its reference PyTorch implementation" not in record.getMessage()


_LOAD_REPORT, _REFERENCE_KERNELS = _LoadReport(), _ReferenceKernels()


@contextmanager
def without_load_report() -> Iterator[None]:
    """While a model is loaded by someone who checks its keys."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_LOAD_REPORT)
    try:
        yield
    finally:
        logger.removeFilter(_LOAD_REPORT)


def say_missing_kernels(device: torch.device) -> None:
    """Show what transformers says of missing kernels on a GPU, where it matters, and not on a CPU."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    if device.type == "cpu":
        logger.addFilter(_REFERENCE_KERNELS)
    else:
        logger.removeFilter(_REFERENCE_KERNELS)
