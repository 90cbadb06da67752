"""OpenAI's Responses API: items in and out, and conversations that the server stores."""
