"""Draftline trains DFlash drafters for speculative decoding, in one process."""

from draftline.quiet import hold_back

__version__ = "0.1.0"

hold_back()  # here, because any module may be the first to import transformers
