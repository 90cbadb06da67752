"""C++ kernels for bfloat16 on CPUs with AVX512, AVX2 or NEON, compiled once where they run."""
