// The small ops between the products: norm, rotary embedding with the KV store, the best token.
#include <algorithm>
#include <cmath>

#include "bf16.h"
#include "native.h"

namespace stemma {
namespace {

// Rows of a chunk, so that a chunk has about this many elements: less is not worth sharing out.
constexpr int64_t kChunkElements = 32768;

template <class F>
void for_each_row(int64_t num_rows, int64_t row_size, F&& body) {
    const int64_t rows_each = std::max<int64_t>(kChunkElements / row_size, 1);
    pool().for_each(static_cast<int>((num_rows + rows_each - 1) / rows_each), [&](int chunk) {
        const int64_t last = std::min<int64_t>(num_rows, (chunk + 1) * rows_each);
        for (int64_t row = chunk * rows_each; row < last; ++row) body(row);
    });
}

inline __mmask16 lanes_from(int64_t at, int64_t size) {
    return size - at >= 16 ? 0xffff : static_cast<__mmask16>((1u << (size - at)) - 1);
}

}  // namespace
}  // namespace stemma

using namespace stemma;

// x, residual (or null, updated in place), y: [num_rows, size]; weight: float32.
extern "C" void stemma_rms_norm(const void* x, void* residual, const float* weight, float eps,
                                void* y, int64_t num_rows, int64_t size) {
    for_each_row(num_rows, size, [&](int64_t row) {
        const bf16* from = static_cast<const bf16*>(x) + row * size;
        __m512 squares = _mm512_setzero_ps();
        if (residual != nullptr) {
            bf16* sum = static_cast<bf16*>(residual) + row * size;
            for (int64_t i = 0; i < size; i += 16) {
                const __mmask16 lanes = lanes_from(i, size);
                const __m512 added =
                    _mm512_add_ps(load_bf16(sum + i, lanes), load_bf16(from + i, lanes));
                store_bf16(sum + i, added, lanes);
                const __m512 rounded = widen(narrow(added));
                squares = _mm512_fmadd_ps(rounded, rounded, squares);
            }
            from = sum;
        } else {
            for (int64_t i = 0; i < size; i += 16) {
                const __m512 value = load_bf16(from + i, lanes_from(i, size));
                squares = _mm512_fmadd_ps(value, value, squares);
            }
        }
        const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
        const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
        bf16* to = static_cast<bf16*>(y) + row * size;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 lanes = lanes_from(i, size);
            const __m512 value = _mm512_mul_ps(load_bf16(from + i, lanes), factor);
            store_bf16(to + i, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(lanes, weight + i)),
                       lanes);
        }
    });
}

namespace {

// Half rotation: with d = dims / 2, (a, b) = (from[:d], from[d:]) becomes
// (a cos + b sin[:d], b cos + a sin[d:]), the first half of sin negated.
void rotate(const bf16* from, const bf16* cos, const bf16* sin, bf16* to, int64_t dims) {
    const int64_t half = dims / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 lanes = lanes_from(i, half);
        const __m512 a = load_bf16(from + i, lanes), b = load_bf16(from + half + i, lanes);
        const __m512 first = _mm512_fmadd_ps(b, load_bf16(sin + i, lanes),
                                             _mm512_mul_ps(a, load_bf16(cos + i, lanes)));
        const __m512 second = _mm512_fmadd_ps(a, load_bf16(sin + half + i, lanes),
                                              _mm512_mul_ps(b, load_bf16(cos + half + i, lanes)));
        store_bf16(to + i, first, lanes);
        store_bf16(to + half + i, second, lanes);
    }
}

}  // namespace

// heads [T, num_heads + 2 * num_kv_heads, dims]: queries are rotated in place, keys rotated into
// kv[0], values copied into kv[1]; kv [2, num_kv_heads, num_slots, dims]; cos, sin [T, dims].
extern "C" void stemma_rotate_and_store(void* heads, const void* cos, const void* sin, void* kv,
                                        const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                                        int64_t num_kv_heads, int64_t num_slots, int64_t dims) {
    const int64_t stride = (num_heads + 2 * num_kv_heads) * dims;
    for_each_row(num_tokens, stride, [&](int64_t token) {
        bf16* head = static_cast<bf16*>(heads) + token * stride;
        const bf16* cosines = static_cast<const bf16*>(cos) + token * dims;
        const bf16* sines = static_cast<const bf16*>(sin) + token * dims;
        for (int64_t h = 0; h < num_heads; ++h, head += dims)
            rotate(head, cosines, sines, head, dims);
        bf16* to = static_cast<bf16*>(kv) + slots[token] * dims;
        for (int64_t h = 0; h < num_kv_heads; ++h, head += dims, to += num_slots * dims)
            rotate(head, cosines, sines, to, dims);
        for (int64_t h = 0; h < num_kv_heads; ++h, head += dims, to += num_slots * dims)
            std::copy(head, head + dims, to);
    });
}

// logits [num_rows, size] -> the first best of each row; a NaN is before all. -1: not finite.
extern "C" void stemma_argmax(const float* logits, int64_t num_rows, int64_t size, int64_t* best) {
    for_each_row(num_rows, size, [&](int64_t row) {
        const float* from = logits + row * size;
        __m512 top = _mm512_set1_ps(-INFINITY);
        __mmask16 is_nan = 0;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 lanes = lanes_from(i, size);
            const __m512 value =
                _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes, from + i);
            is_nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            top = _mm512_max_ps(top, value);
        }
        const float largest = _mm512_reduce_max_ps(top);
        best[row] = -1;
        if (is_nan || !std::isfinite(largest)) return;
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 value =
                _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_from(i, size), from + i);
            const __mmask16 equal = _mm512_cmp_ps_mask(value, _mm512_set1_ps(largest), _CMP_EQ_OQ);
            if (equal) {
                best[row] = i + __builtin_ctz(equal);
                return;
            }
        }
    });
}
