"""Checks against inference engines. They need files or environments of their own: docs/serving.md says which."""
