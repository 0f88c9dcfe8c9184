"""Threads and what passes between them: supervisor, channel, reduction. Only loops; logic lies elsewhere."""
