"""KV pools on device and host, and copies between tiers."""
