"""The faces of an engine: the ZeroMQ gateway and the HTTP application."""
