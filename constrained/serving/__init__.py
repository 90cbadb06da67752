"""Compiles grammars in processes beside the engine; requests follow them token by token."""
