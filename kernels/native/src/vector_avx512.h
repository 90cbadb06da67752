// vector.h for CPUs with AVX512-BF16, AVX512-VBMI and AVX512-VNNI: a register is 16 lanes.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "transpose_avx512.h"

namespace stemma {

constexpr int kRegisters = 32;

using Floats = __m512;
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
using Halfwords = __m256i;
using Choice = __mmask16;

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Ints splat(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Ints zero_ints() { return (Ints)_mm512_setzero_si512(); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
inline Ints load_ints(const void* from) { return (Ints)_mm512_load_si512(from); }
inline Ints load_ints(const void* from, Mask lanes) {
    return (Ints)_mm512_maskz_loadu_epi32(lanes, from);
}
// Up to 32 numbers, two a lane; zero past the last.
inline Ints load_pairs(const bf16* from, int64_t count) {
    return (Ints)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
}
// 16 signed bytes.
inline Ints load_bytes(const void* from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline Halfwords load_halfwords(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Halfwords load_halfwords(const uint16_t* from, Mask lanes) {
    return _mm256_maskz_loadu_epi16(lanes, from);
}
inline Floats load_float16(const void* from) {
    return _mm512_cvtph_ps(_mm256_load_si256(static_cast<const __m256i*>(from)));
}
inline Floats gather(const float* from, const int32_t* at, Mask lanes) {
    const __m512i index = _mm512_maskz_loadu_epi32(lanes, at);
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, index, from, sizeof(float));
}
inline Ints gather_strided(const void* from, int32_t stride, Mask lanes) {
    const __m512i index = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(stride));
    return (Ints)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, index, from, 4);
}

inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, Floats x, Mask lanes) { _mm512_mask_storeu_ps(to, lanes, x); }
inline void store_ints(void* to, Ints x) { _mm512_store_si512(to, (__m512i)x); }
inline void store_halfwords(uint16_t* to, Halfwords x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}
inline void store_halfwords(uint16_t* to, Halfwords x, Mask lanes) {
    _mm256_mask_storeu_epi16(to, lanes, x);
}
inline void store_bytes(void* to, Ints x, Mask lanes) {
    _mm512_mask_cvtepi32_storeu_epi8(to, lanes, (__m512i)x);
}

inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Ints max(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline Ints min(Ints a, Ints b) { return (Ints)_mm512_min_epi32((__m512i)a, (__m512i)b); }
template <int kBits>
inline Ints shift_right(Ints x) {
    return (Ints)_mm512_srli_epi32((__m512i)x, kBits);
}
inline Choice less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Choice less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
inline Choice is_number(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
inline Choice choice(Mask lanes) { return lanes; }
inline Floats select(Choice at, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(at, no, yes);
}
inline Ints select(Choice at, Ints yes, Ints no) {
    return (Ints)_mm512_mask_blend_epi32(at, (__m512i)no, (__m512i)yes);
}

inline Ints as_ints(Floats x) { return (Ints)_mm512_castps_si512(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps((__m512i)x); }
inline Ints round_to_ints(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
inline Ints zero_extend(Halfwords x) { return (Ints)_mm512_cvtepu16_epi32(x); }
inline Halfwords narrow(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
inline int32_t largest_of(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }
inline Floats splat_lane(Floats x, int lane) {
    return _mm512_permutexvar_ps(_mm512_set1_epi32(lane), x);
}

// sum + column * number.
inline Floats add_product(Floats sum, Floats column, float number) {
    return fmadd(column, splat(number), sum);
}
// sum + the products of two numbers in bfloat16 a lane.
inline Floats add_pair_products(Floats sum, Ints a, Ints b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

inline void transpose(Ints (&rows)[16]) { transpose_registers(rows); }

// Every byte of x, from 0 to 15, replaced by that place of the table.
inline Ints lookup(const int8_t (&table)[16], Ints x) {
    const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), (__m512i)x);
}

}  // namespace stemma
