// What Python calls, and the one pool that all kernels share.
#pragma once

#include <cstdint>

#include "pool.h"

namespace stemma {

Pool& pool();

enum LinearKind : int32_t { kPlain = 0, kFloatOutput = 1, kGated = 2 };

// Mirrored by ctypes in native.py.
struct PackedLinear {
    const void* panels;  // bf16, 64-byte aligned
    const float* bias;   // num_panels * 32 floats, or null
    int64_t num_inputs;  // even
    int64_t num_outputs;
    int64_t num_panels;
    int32_t kind;
};

}  // namespace stemma
