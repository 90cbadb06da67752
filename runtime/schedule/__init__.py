"""What runs next, and with which KV pages."""
