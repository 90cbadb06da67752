"""Stemma's own endpoints."""
