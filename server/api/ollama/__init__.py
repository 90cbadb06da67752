"""Ollama's API: chats, completions, embeddings, and what models there are."""
