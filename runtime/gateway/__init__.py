"""The engine's ZeroMQ server, within the engine's process: clients' ops in, events out."""
