"""Marks that tests of several files carry."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install torchao"
)
