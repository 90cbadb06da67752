"""From an endpoint's task to programs on the engine, and back as a response or a stream."""
