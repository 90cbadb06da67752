// The two instructions of AVX512-BF16 that the kernels take, by others, for CPUs that lack only these.
#pragma once

#include <immintrin.h>

#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh

// Products of the second numbers first, as the instruction has it; it rounds once more.
inline __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i second = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const auto number = [&](__m512bh x, bool is_second) {
        const __m512i bits = (__m512i)x;
        return _mm512_castsi512_ps(is_second ? _mm512_and_si512(bits, second)
                                             : _mm512_slli_epi32(bits, 16));
    };
    sum = _mm512_fmadd_ps(number(a, true), number(b, true), sum);
    return _mm512_fmadd_ps(number(a, false), number(b, false), sum);
}

inline __m256bh emulated_cvtneps_pbh(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i wide =
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), quiet, rounded);
    return (__m256bh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}
