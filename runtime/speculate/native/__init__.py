"""C++ for drafting, compiled at first use on any CPU."""
