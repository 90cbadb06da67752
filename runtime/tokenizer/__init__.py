"""Text to token ids and back, chat templates, transcripts. No torch."""
