"""What the kernels and the engine reach on a GPU, held against what that GPU can do."""
