"""The page at `/`: a chat, and a view of the engine at work."""
