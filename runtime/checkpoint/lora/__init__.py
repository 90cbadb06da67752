"""Low-rank adapters: their files, and the registry of their names."""
