"""What the server counts, in Prometheus form."""
