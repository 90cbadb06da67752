"""The client's side of ZeroMQ: connection, running programs, the engine's process."""
