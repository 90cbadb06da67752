"""Checkpoints in safetensors."""
