"""Packed integer weights: read, made while loading, written."""
