// Conversions between numbers in memory, bfloat16 or float, and floats in registers, 16 lanes at a
// time, and the functions that the kernels share.
#pragma once

#include <cstdint>

#include "vector.h"

namespace stemma {

STEMMA_INLINE Floats widen(Halfwords narrow) { return as_floats(zero_extend(narrow) << 16); }

STEMMA_INLINE Floats load_bf16(const bf16* from) { return widen(load_halfwords(from)); }
STEMMA_INLINE Floats load_bf16(const bf16* from, Mask lanes) {
    return widen(load_halfwords(from, lanes));
}
STEMMA_INLINE void store_bf16(bf16* to, Floats wide) { store_halfwords(to, narrow(wide)); }
STEMMA_INLINE void store_bf16(bf16* to, Floats wide, Mask lanes) {
    store_halfwords(to, narrow(wide), lanes);
}

STEMMA_INLINE Floats load_numbers(const bf16* from, Mask lanes) { return load_bf16(from, lanes); }
STEMMA_INLINE Floats load_numbers(const float* from, Mask lanes) { return load(from, lanes); }
STEMMA_INLINE void store_numbers(bf16* to, Floats value, Mask lanes) {
    store_bf16(to, value, lanes);
}
STEMMA_INLINE void store_numbers(float* to, Floats value, Mask lanes) { store(to, value, lanes); }

// 2^x within 3e-6 for x <= 0 (0 below 2^-126, and for -inf): the whole part by the exponent field, 2^fraction by a
// polynomial (minimax on [-0.5, 0.5]).
STEMMA_INLINE Floats exp2_nonpositive(Floats x) {
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded
    const Choice is_normal = less(splat(-126.0f), x);
    const Floats shifted = x + shift;
    const Floats part = x - (shifted - shift);
    Floats power = splat(9.58274e-3f);
    power = fmadd(power, part, splat(5.590613e-2f));
    power = fmadd(power, part, splat(2.4024099e-1f));
    power = fmadd(power, part, splat(6.9312423e-1f));
    power = fmadd(power, part, splat(1.0f));
    const Ints exponent = as_ints(shifted) << 23;
    return as_floats(select(is_normal, as_ints(power) + exponent, zero_ints()));
}

// The same within 1e-7: Taylor's polynomial of degree 7.
STEMMA_INLINE Floats exp2_nonpositive_exactly(Floats x) {
    const Floats shift = splat(12582912.0f);
    const Choice is_normal = less(splat(-126.0f), x);
    const Floats shifted = x + shift;
    const Floats part = x - (shifted - shift);
    constexpr float kTerms[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                                2.4022651e-1f, 6.9314718e-1f, 1.0f};
    Floats power = splat(1.5252734e-5f);
    for (const float term : kTerms) power = fmadd(power, part, splat(term));
    const Ints exponent = as_ints(shifted) << 23;
    return as_floats(select(is_normal, as_ints(power) + exponent, zero_ints()));
}

// For results in the given type.
STEMMA_INLINE Floats exp_nonpositive(const bf16*, Floats x) {
    return exp2_nonpositive(x * splat(1.44269504f));
}
STEMMA_INLINE Floats exp_nonpositive(const float*, Floats x) {
    return exp2_nonpositive_exactly(x * splat(1.44269504f));
}

// tanh within 3e-7 of it, relative: a quotient of an odd and an even polynomial over [-7.9, 7.9],
// past which float32 has 1 (the coefficients are Eigen's, generic_fast_tanh_float).
STEMMA_INLINE Floats tanh(Floats x) {
    const Floats limit = splat(7.90531110763549805f);
    const Floats near = max(min(x, limit), zero_floats() - limit);
    const Floats square = near * near;
    const auto next = [&square](Floats sum, float coefficient) {
        return fmadd(sum, square, splat(coefficient));
    };
    Floats odd = next(splat(-2.76076847742355e-16f), 2.00018790482477e-13f);
    odd = next(odd, -8.60467152213735e-11f);
    odd = next(odd, 5.12229709037114e-08f);
    odd = next(odd, 1.48572235717979e-05f);
    odd = next(odd, 6.37261928875436e-04f);
    odd = near * next(odd, 4.89352455891786e-03f);
    Floats even = next(splat(1.19825839466702e-06f), 1.18534705686654e-04f);
    even = next(even, 2.26843463243900e-03f);
    return odd / next(even, 4.89352518554385e-03f);
}

}  // namespace stemma
