"""C++ kernels for bfloat16 on CPUs with AVX512-BF16, compiled once on the machine they run on."""
