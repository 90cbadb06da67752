"""How models write calls of tools, and how these are asked for and read."""
