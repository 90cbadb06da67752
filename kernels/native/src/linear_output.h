// What becomes of a linear layer's sums: bias, activation, rounding, store.
#pragma once

#include "bf16.h"
#include "native.h"

namespace stemma {

constexpr int kPanel = 32;  // columns whose sums a tile holds

struct LinearOutput {
    const float* bias;  // num_panels * 32 floats, or null
    void* y;
    int64_t num_outputs;
    int32_t kind;
};

// x * sigmoid(slope)
template <class Number>
__m512 times_sigmoid(__m512 x, __m512 slope) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 size = _mm512_abs_ps(slope);
    const __m512 decay =
        exp_nonpositive(static_cast<Number*>(nullptr), _mm512_sub_ps(_mm512_setzero_ps(), size));
    // sigmoid(s) is 1 / (1 + decay) for s >= 0 and decay / (1 + decay) below
    const __mmask16 is_negative = _mm512_cmp_ps_mask(slope, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 top = _mm512_mask_blend_ps(is_negative, one, decay);
    return _mm512_mul_ps(x, _mm512_div_ps(top, _mm512_add_ps(one, decay)));
}

template <class Number>
__m512 silu(__m512 x) {
    return times_sigmoid<Number>(x, x);
}

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class Number>
__m512 gelu_tanh(__m512 x) {
    const __m512 square = _mm512_mul_ps(x, x);
    const __m512 factor = _mm512_fmadd_ps(square, _mm512_set1_ps(2 * 0.7978845608f * 0.044715f),
                                          _mm512_set1_ps(2 * 0.7978845608f));
    return times_sigmoid<Number>(x, _mm512_mul_ps(x, factor));
}

// x / 2 * erfc(-x / sqrt(2)), erfc within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
template <class Number>
__m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
    __m512 tail = _mm512_set1_ps(1.061405429f);
    tail = _mm512_fmadd_ps(tail, t, _mm512_set1_ps(-1.453152027f));
    tail = _mm512_fmadd_ps(tail, t, _mm512_set1_ps(1.421413741f));
    tail = _mm512_fmadd_ps(tail, t, _mm512_set1_ps(-0.284496736f));
    tail = _mm512_fmadd_ps(tail, t, _mm512_set1_ps(0.254829592f));
    const __m512 decay = exp_nonpositive(static_cast<Number*>(nullptr),
                                         _mm512_fnmadd_ps(size, size, _mm512_setzero_ps()));
    tail = _mm512_mul_ps(_mm512_mul_ps(tail, t), decay);  // erfc(|x| / sqrt(2))
    const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 both = _mm512_mask_sub_ps(tail, static_cast<__mmask16>(~is_negative),
                                           _mm512_set1_ps(2.0f), tail);
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), both);
}

// activation(gate) * up for a gated kind.
template <class Number>
__m512 gated(int32_t kind, __m512 gate, __m512 up) {
    const __m512 active = kind == kGatedSilu   ? silu<Number>(gate)
                          : kind == kGatedGelu ? gelu<Number>(gate)
                                               : gelu_tanh<Number>(gate);
    return _mm512_mul_ps(active, up);
}

inline __mmask16 lanes_below(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// The sums of a panel's columns of one row; of a gated kind or halves, of 16 gates and their 16 ups.
// Number: what all but logits and halves are stored in.
template <class Number = bf16>
void finish_row(const LinearOutput& output, __m512 left, __m512 right, int64_t row,
                       int64_t panel) {
    if (output.bias != nullptr) {
        left = _mm512_add_ps(left, _mm512_loadu_ps(output.bias + panel * kPanel));
        right = _mm512_add_ps(right, _mm512_loadu_ps(output.bias + panel * kPanel + 16));
    }
    if (output.kind >= kGatedSilu) {
        const int64_t column = panel * (kPanel / 2);
        const __mmask16 lanes = lanes_below(output.num_outputs - column);
        if (output.kind == kHalves) {
            auto* out = static_cast<float*>(output.y) + row * 2 * output.num_outputs + column;
            _mm512_mask_storeu_ps(out, lanes, left);
            _mm512_mask_storeu_ps(out + output.num_outputs, lanes, right);
            return;
        }
        auto* out = static_cast<Number*>(output.y) + row * output.num_outputs + column;
        store_numbers(out, gated<Number>(output.kind, left, right), lanes);
        return;
    }
    const int64_t column = panel * kPanel;
    const __mmask16 in_left = lanes_below(output.num_outputs - column);
    const __mmask16 in_right = lanes_below(output.num_outputs - column - 16);
    if (output.kind == kFloatOutput) {
        auto* out = static_cast<float*>(output.y) + row * output.num_outputs + column;
        _mm512_mask_storeu_ps(out, in_left, left);
        _mm512_mask_storeu_ps(out + 16, in_right, right);
    } else {
        auto* out = static_cast<Number*>(output.y) + row * output.num_outputs + column;
        store_numbers(out, left, in_left);
        store_numbers(out + 16, right, in_right);
    }
}

}  // namespace stemma
