"""Programs on endpoints that speak OpenAI's HTTP API: each call is asked of a server by itself."""
