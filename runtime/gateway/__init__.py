"""The engine's side of ZeroMQ: clients in, events out, within the engine's process."""
