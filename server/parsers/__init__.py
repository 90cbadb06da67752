"""How models write tool calls and reasoning; how these are constrained and parsed."""
