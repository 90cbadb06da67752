"""OpenAI's endpoints: request fields and response formats."""
