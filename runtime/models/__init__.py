"""Decoder-only models, composed of layers."""
