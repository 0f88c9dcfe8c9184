"""Draftline trains DFlash drafters for speculative decoding, in one process."""

__version__ = "0.1.0"
