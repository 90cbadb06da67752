"""C++ for grammar work that is too slow in Python, compiled at first use on any CPU."""
