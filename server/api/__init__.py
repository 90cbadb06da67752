"""The HTTP endpoints, one folder per API."""
