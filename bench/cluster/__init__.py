"""Several engines behind one address: what the router costs, and what placing brings."""
