"""The listening side of the protocol: sockets, sessions, what is owed to whom. Knows no engine."""
