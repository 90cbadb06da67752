// Conversions between bfloat16 in memory and float32 in registers, 16 lanes at a time.
// Number types of the kernels' inputs and outputs: bf16 and float.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace stemma {

using bf16 = uint16_t;

inline __m512 widen(__m256i narrow) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline __m512 load_bf16(const bf16* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512 load_bf16(const bf16* from, __mmask16 lanes) {
    return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

inline __m256i narrow(__m512 wide) { return (__m256i)_mm512_cvtneps_pbh(wide); }

inline void store_bf16(bf16* to, __m512 wide) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(wide));
}

inline void store_bf16(bf16* to, __m512 wide, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(to, lanes, narrow(wide));
}

inline __m512 load_numbers(const bf16* from, __mmask16 lanes) { return load_bf16(from, lanes); }
inline __m512 load_numbers(const float* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
}
inline void store_numbers(bf16* to, __m512 value, __mmask16 lanes) { store_bf16(to, value, lanes); }
inline void store_numbers(float* to, __m512 value, __mmask16 lanes) {
    _mm512_mask_storeu_ps(to, lanes, value);
}

// What the sums of a product get from 4 bytes of an input, in all lanes, and their weights: two
// numbers of bfloat16, or one.
inline __m512 add_products(const bf16*, __m512 sum, __m512i weights, __m512i input) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)input);
}
inline __m512 add_products(const float*, __m512 sum, __m512i weights, __m512i input) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(input), sum);
}

// 2^x within 3e-6 for x <= 0 (0 below 2^-126, and for -inf): the whole part by the exponent field, 2^fraction by a
// polynomial (minimax on [-0.5, 0.5]).
inline __m512 exp2_nonpositive(__m512 x) {
    const __m512 shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
    const __m512 shifted = _mm512_add_ps(x, shift);
    const __m512 part = _mm512_sub_ps(x, _mm512_sub_ps(shifted, shift));
    __m512 power = _mm512_set1_ps(9.58274e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.590613e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.4024099e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.9312423e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(is_normal, _mm512_castps_si512(power), exponent));
}

// The same within 1e-7: Taylor's polynomial of degree 7.
inline __m512 exp2_nonpositive_exactly(__m512 x) {
    const __m512 shift = _mm512_set1_ps(12582912.0f);
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
    const __m512 shifted = _mm512_add_ps(x, shift);
    const __m512 part = _mm512_sub_ps(x, _mm512_sub_ps(shifted, shift));
    constexpr float kTerms[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                                2.4022651e-1f, 6.9314718e-1f, 1.0f};
    __m512 power = _mm512_set1_ps(1.5252734e-5f);
    for (const float term : kTerms) power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(term));
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(is_normal, _mm512_castps_si512(power), exponent));
}

// For results in the given type.
inline __m512 exp_nonpositive(const bf16*, __m512 x) {
    return exp2_nonpositive(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
}
inline __m512 exp_nonpositive(const float*, __m512 x) {
    return exp2_nonpositive_exactly(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
}

// tanh within 3e-7 of it, relative: a quotient of an odd and an even polynomial over [-7.9, 7.9],
// past which float32 has 1 (the coefficients are Eigen's, generic_fast_tanh_float).
inline __m512 tanh(__m512 x) {
    const __m512 limit = _mm512_set1_ps(7.90531110763549805f);
    const __m512 near =
        _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    const __m512 square = _mm512_mul_ps(near, near);
    const auto next = [&square](__m512 sum, float coefficient) {
        return _mm512_fmadd_ps(sum, square, _mm512_set1_ps(coefficient));
    };
    __m512 odd = next(_mm512_set1_ps(-2.76076847742355e-16f), 2.00018790482477e-13f);
    odd = next(odd, -8.60467152213735e-11f);
    odd = next(odd, 5.12229709037114e-08f);
    odd = next(odd, 1.48572235717979e-05f);
    odd = next(odd, 6.37261928875436e-04f);
    odd = _mm512_mul_ps(near, next(odd, 4.89352455891786e-03f));
    __m512 even = next(_mm512_set1_ps(1.19825839466702e-06f), 1.18534705686654e-04f);
    even = next(even, 2.26843463243900e-03f);
    return _mm512_div_ps(odd, next(even, 4.89352518554385e-03f));
}

}  // namespace stemma
