"""KV blocks on other machines."""
