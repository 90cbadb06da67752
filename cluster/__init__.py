"""Many engines as one: where programs run, and what happens when an engine does not."""
