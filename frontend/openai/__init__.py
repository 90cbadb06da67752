"""Programs on endpoints with OpenAI's HTTP API: each call is a separate request."""
