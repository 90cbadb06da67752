"""What every endpoint shares: bodies, callers, errors, streams."""
