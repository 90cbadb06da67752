"""Low-rank adapters: what is in their folders, and who knows them by name."""
