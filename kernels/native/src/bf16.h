// Conversions between bfloat16 in memory and float32 in registers, 16 lanes at a time.
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

// e^x within 2 ulp for x <= 0 (-inf gives 0): 2^(x log2 e), the fraction by a polynomial of degree 5
// (minimax on [-0.5, 0.5]), the whole part by the exponent field.
inline __m512 exp_nonpositive(__m512 x) {
    const __m512 scaled = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _mm512_set1_ps(-150.0f));
    const __m512 whole =
        _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(scaled, whole);
    __m512 power = _mm512_set1_ps(1.33903994e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.67029564e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.55034130e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40222478e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93147209e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
}

}  // namespace stemma
