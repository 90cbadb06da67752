"""What the engine shows of itself to those who watch: steps, tree, pool, queue. No torch."""
