"""The HTTP side: a separate process, and an engine client like any other."""
