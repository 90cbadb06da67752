"""The HTTP side: a process of its own, a client of the engine like any other."""
