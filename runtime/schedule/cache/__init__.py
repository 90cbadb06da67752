"""Which KV is cached, on all tiers. No torch."""
