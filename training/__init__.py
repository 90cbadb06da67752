"""Drafts that are trained for a model, on what it says in programs."""
