"""Which KV is kept, on all tiers. No torch."""
