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

extern "C" {
void stemma_linear(const stemma::PackedLinear* weight, const void* x, void* y, int64_t num_rows);
void stemma_rms_norm(const void* x, void* residual, const float* weight, double eps, void* y,
                     int64_t num_rows, int64_t size);
void stemma_rotate_and_store(void* heads, const void* cos, const void* sin, void* kv,
                             const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                             int64_t num_kv_heads, int64_t num_slots, int64_t dims);
void stemma_attention(const void* plan, const void* q, int64_t q_stride, const void* kv, void* out);
void stemma_gather_rows(const void* table, const int64_t* index, void* rows, int64_t num_rows,
                        int64_t row_bytes);
void stemma_apply_token_mask(void* logits, const int64_t* rows, const uint32_t* masks,
                             int64_t num_rows, int64_t vocab_size, int64_t num_words,
                             int64_t is_double);
}
