"""The type of an event that orders streams; PyTorch has two classes for it."""

from __future__ import annotations

import torch

DeviceEvent = torch.cuda.Event | torch.Event
"""Recorded on one stream, waited for by another or by the host."""
