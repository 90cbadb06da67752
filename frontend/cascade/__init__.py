"""Cascades: a small model answers, and a larger one is asked for what it is not trusted with."""
