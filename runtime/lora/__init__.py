"""Low-rank adapters: what is in their folders, who knows them by name, which ones hold a slot."""
