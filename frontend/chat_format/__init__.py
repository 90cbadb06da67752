"""How models write tool calls and reasoning into their text, and how these are read."""
