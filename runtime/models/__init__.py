"""Decoder-only models, made of layers."""
