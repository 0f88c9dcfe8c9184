"""Drafters as folders that others load and that Draftline reads back: export, import, formats, cards."""
