"""Inspecting programs: what one would do (capture), what it did (report), and pictures of both."""
