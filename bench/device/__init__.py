"""Steps, kernels and quantization on one device."""
