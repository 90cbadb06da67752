"""Quantization by what a model computes: its linears' inputs in programs decide how they round."""
