"""Every kernel compiled for sm_90 without a GPU, its registers, spills, shared memory and products
held to a committed budget; see docs/measure/gpu-testing.md."""
