"""The `sglang-ft` command."""
