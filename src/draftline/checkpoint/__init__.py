"""Durable training state: read write.py for the protocol, restore.py for how a run resumes."""

from draftline.checkpoint.best import Best
from draftline.checkpoint.checkpointer import Checkpointer
from draftline.checkpoint.manifest import Identity
from draftline.checkpoint.restore import Loaded, read_checkpoint, refuse_other_run
from draftline.checkpoint.write import Snapshot

__all__ = ["Best", "Checkpointer", "Identity", "Loaded", "Snapshot", "read_checkpoint", "refuse_other_run"]
