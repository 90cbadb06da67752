"""Compiles every kernel for sm_90 without a GPU, and checks its registers, spills, shared memory
and products against a committed budget; see docs/measure/gpu-testing.md."""
