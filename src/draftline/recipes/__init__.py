"""Complete runs as files."""
