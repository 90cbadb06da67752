// What Python calls, and the one pool that all kernels share.
#pragma once

#include <cstdint>

#include "pool.h"

namespace stemma {

Pool& pool();

enum LinearKind : int32_t {
    kPlain = 0,
    kFloatOutput = 1,
    kGatedSilu = 2,
    kGatedGelu = 3,
    kGatedGeluTanh = 4,
    kHalves = 5,  // the sums of gates and ups as they are, gates first: y [T, 2 * num_outputs]
};

// Mirrored by ctypes in linear.py.
struct PackedLinear {
    const void* panels;  // bf16 or float, 64-byte aligned
    const float* bias;   // num_panels * 32 floats, or null
    int64_t num_inputs;  // even in bf16
    int64_t num_outputs;
    int64_t num_panels;
    int32_t kind;
    int32_t is_float;    // weights, inputs and outputs: float, else bf16
};

// Mirrored by ctypes in quantized_linear.py; see quantized_linear.cpp.
struct QuantizedLinear {
    const void* panels;          // 64-byte aligned
    const float* bias;           // num_panels * 32 floats, or null
    const float* column_scales;  // num_panels * 32 floats: what a column's sum is times at the end
    const int32_t* input_order;  // which input each number of a row belongs to; null: its own
    int64_t num_inputs;          // a multiple of 16
    int64_t num_outputs;
    int64_t num_panels;
    int64_t block;        // inputs whose products are summed as integers, a multiple of 16
    int64_t panel_bytes;
    int64_t row_bytes;    // of a row of rounded inputs, a multiple of 64
    int32_t kind;
    int32_t bits;         // 8 or 4
    int32_t num_planes;   // bytes of a rounded input: 2, or 1 for W8A8
    int32_t has_scales;   // one a block and column, else the column's alone
    int32_t has_offsets;  // likewise; only with scales
    int32_t is_fp4;       // 4 bits are the code of a float E2M1
};

// Mirrored by ctypes in lora.py.
struct LoraTables {
    const void* a;       // bf16 [slots, num_modules * rank, num_inputs]
    const void* b;       // bf16 [slots, ends[num_modules - 1], rank]
    int64_t num_inputs;
    int64_t rank;        // even
    int64_t num_modules;
    int64_t ends[4];     // of each module's outputs
};

// Mirrored by ctypes in lora.py.
struct LoraRuns {
    const int64_t* runs;  // [num_runs, 3]: slot from 1, first token, end
    int64_t num_runs;
};

}  // namespace stemma

extern "C" {
void stemma_linear(const stemma::PackedLinear* weight, const void* x, void* y, int64_t num_rows);
void stemma_quantized_linear(const stemma::QuantizedLinear* weight, const void* x, void* y,
                             int64_t num_rows, void* rounded);
void stemma_rms_norm(const void* x, void* residual, const float* weight, double eps, void* y,
                     int64_t num_rows, int64_t size);
void stemma_rotate_and_store(void* heads, const void* cos, const void* sin, void* kv, float* scales,
                             const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                             int64_t num_kv_heads, int64_t num_slots, int64_t dims,
                             int64_t rotary_dim, int64_t format);
void stemma_norm_slices(void* x, const float* weight, double eps, int64_t num_tokens,
                        int64_t stride, int64_t num_slices, int64_t size);
void stemma_scale(void* x, double factor, int64_t num_rows, int64_t size);
void stemma_add(void* total, const void* x, int64_t num_rows, int64_t size);
void stemma_attention(const void* plan, const void* q, int64_t q_stride, const void* kv,
                      const float* scales, const float* sinks, void* out);
void stemma_float_attention(const void* plan, const void* q, int64_t q_stride, const void* kv,
                            const float* scales, const float* sinks, void* out);
void stemma_act_and_mul(const float* halves, void* y, int64_t num_rows, int64_t size, int64_t kind);
void stemma_lora(const stemma::LoraRuns* plan, const stemma::LoraTables* tables, const void* x,
                 void* y, int64_t is_float);
void stemma_gather_rows(const void* table, const int64_t* index, void* rows, int64_t num_rows,
                        int64_t row_bytes);
void stemma_join_columns(const void* first, const void* second, void* joined, int64_t num_rows,
                         int64_t first_bytes, int64_t second_bytes);
void stemma_gather_share(const void* table, const int64_t* index, void* rows, int64_t num_rows,
                         int64_t row_bytes, int64_t first, int64_t table_rows);
void stemma_apply_token_mask(void* logits, const int64_t* rows, const uint32_t* masks,
                             int64_t num_rows, int64_t vocab_size, int64_t num_words,
                             int64_t is_double);
void stemma_observe(const float* q, const float* keys, float* sums, int64_t num_kv_heads,
                    int64_t num_queries, int64_t num_rows, int64_t num_keys, int64_t dims,
                    int64_t num_parts, double scale, double soft_cap);
void stemma_all_reduce(void* communicator, void* x, int64_t count, int64_t kind);
}
