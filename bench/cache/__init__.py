"""The radix tree against its limits and peers."""
