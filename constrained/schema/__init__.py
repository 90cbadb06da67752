"""JSON Schema to grammar."""
