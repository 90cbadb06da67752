"""Who may ask for how much: keys, rates, limits, namespaces."""
