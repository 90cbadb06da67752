"""Who waits, in which order, and who may start. No torch."""
