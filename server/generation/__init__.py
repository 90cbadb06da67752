"""From an endpoint's task to programs on the engine, and back as an answer or a stream."""
