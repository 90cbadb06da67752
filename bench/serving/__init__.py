"""Whole engines and servers under load, against peers."""
