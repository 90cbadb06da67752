"""Access control: API keys, rates, limits, namespaces."""
