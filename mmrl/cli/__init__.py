"""The `mmrl` command."""
