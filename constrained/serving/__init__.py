"""Grammars compiled in processes beside the engine, and followed by requests."""
