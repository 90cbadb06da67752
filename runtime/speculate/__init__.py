"""Guesses of what a request generates next, and how many of them are worth verifying."""
