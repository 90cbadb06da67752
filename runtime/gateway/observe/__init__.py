"""Views of the engine for monitoring: steps, tree, pool, queue. No torch."""
