"""The HTTP endpoints: an API a folder."""
