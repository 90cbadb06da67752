"""Encoders: what each family's config.json says, and the one model that computes them all."""
