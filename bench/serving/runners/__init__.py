"""One file an engine: a process under that engine's own Python that runs workloads for a driver."""
