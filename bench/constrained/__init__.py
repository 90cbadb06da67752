"""Grammars: compile and mask times, conformance, and load."""
