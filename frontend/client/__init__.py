"""The client's side of ZeroMQ: connection, programs under way, the engine's process."""
