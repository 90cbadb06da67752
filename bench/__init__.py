"""Benchmarks: seeded scripts that print a table and write JSON; `make bench` runs them all."""
