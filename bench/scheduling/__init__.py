"""Policies, chunking, programs, and the DSL's own cost."""
