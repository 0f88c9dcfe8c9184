"""Other people's implementations, wrapped so that tests can compare with them. Nothing here is copied."""
