"""How models write tool calls and reasoning, and how these are asked for and read."""
