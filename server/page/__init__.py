"""The page at `/`: a chat, and a look at the engine at work."""
