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

    // Whether a panel's sums are but rounded and stored.
    bool is_plain(int64_t panel) const {
        return kind == kPlain && bias == nullptr && (panel + 1) * kPanel <= num_outputs;
    }
};

// x * sigmoid(slope)
template <class Number>
Floats times_sigmoid(Floats x, Floats slope) {
    const Floats one = splat(1.0f);
    const Floats size = abs(slope);
    const Floats decay =
        exp_nonpositive(static_cast<Number*>(nullptr), (zero_floats() - size));
    // sigmoid(s) is 1 / (1 + decay) for s >= 0 and decay / (1 + decay) below
    const Choice is_negative = less(slope, zero_floats());
    const Floats top = select(is_negative, decay, one);
    return x * (top / (one + decay));
}

template <class Number>
Floats silu(Floats x) {
    return times_sigmoid<Number>(x, x);
}

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class Number>
Floats gelu_tanh(Floats x) {
    const Floats square = x * x;
    const Floats factor = fmadd(square, splat(2 * 0.7978845608f * 0.044715f),
                                          splat(2 * 0.7978845608f));
    return times_sigmoid<Number>(x, (x * factor));
}

// x / 2 * erfc(-x / sqrt(2)), erfc within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
template <class Number>
Floats gelu(Floats x) {
    const Floats one = splat(1.0f);
    const Floats size = abs(x) * splat(0.70710678f);
    const Floats t = one / fmadd(size, splat(0.3275911f), one);
    Floats tail = splat(1.061405429f);
    tail = fmadd(tail, t, splat(-1.453152027f));
    tail = fmadd(tail, t, splat(1.421413741f));
    tail = fmadd(tail, t, splat(-0.284496736f));
    tail = fmadd(tail, t, splat(0.254829592f));
    const Floats decay = exp_nonpositive(static_cast<Number*>(nullptr),
                                         fnmadd(size, size, zero_floats()));
    tail = tail * t * decay;  // erfc(|x| / sqrt(2))
    const Choice is_negative = less(x, zero_floats());
    const Floats both = select(is_negative, tail, splat(2.0f) - tail);
    return x * splat(0.5f) * both;
}

// activation(gate) * up for a gated kind.
template <class Number>
Floats gated(int32_t kind, Floats gate, Floats up) {
    const Floats active = kind == kGatedSilu   ? silu<Number>(gate)
                          : kind == kGatedGelu ? gelu<Number>(gate)
                                               : gelu_tanh<Number>(gate);
    return active * up;
}

// See finish_row.
template <class Number>
void finish_row_of_any_kind(const LinearOutput& output, Floats left, Floats right, int64_t row,
                       int64_t panel) {
    if (output.bias != nullptr) {
        left = left + load(output.bias + panel * kPanel);
        right = right + load(output.bias + panel * kPanel + 16);
    }
    if (output.kind >= kGatedSilu) {
        const int64_t column = panel * (kPanel / 2);
        const Mask lanes = lanes_below(output.num_outputs - column);
        if (output.kind == kHalves) {
            auto* out = static_cast<float*>(output.y) + row * 2 * output.num_outputs + column;
            store(out, left, lanes);
            store(out + output.num_outputs, right, lanes);
            return;
        }
        auto* out = static_cast<Number*>(output.y) + row * output.num_outputs + column;
        store_numbers(out, gated<Number>(output.kind, left, right), lanes);
        return;
    }
    const int64_t column = panel * kPanel;
    const Mask in_left = lanes_below(output.num_outputs - column);
    const Mask in_right = lanes_below(output.num_outputs - column - 16);
    if (output.kind == kFloatOutput) {
        auto* out = static_cast<float*>(output.y) + row * output.num_outputs + column;
        store(out, left, in_left);
        store(out + 16, right, in_right);
    } else {
        auto* out = static_cast<Number*>(output.y) + row * output.num_outputs + column;
        store_numbers(out, left, in_left);
        store_numbers(out + 16, right, in_right);
    }
}

// The sums of a panel's columns of one row; of a gated kind or halves, of 16 gates and their 16 ups.
// Number: what all but logits and halves are stored in.
template <class Number = bf16>
STEMMA_INLINE void finish_row(const LinearOutput& output, Floats left, Floats right, int64_t row,
                              int64_t panel) {
    if (!output.is_plain(panel))
        return finish_row_of_any_kind<Number>(output, left, right, row, panel);
    auto* out = static_cast<Number*>(output.y) + row * output.num_outputs + panel * kPanel;
    store_numbers(out, left, 0xffff);
    store_numbers(out + 16, right, 0xffff);
}

}  // namespace stemma
