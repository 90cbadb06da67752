"""C++ for the work of a grammar that is too slow in Python, compiled at first use on any CPU."""
