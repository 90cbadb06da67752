// What vector_parts.h takes from AVX512 without BF16: the one part is a register of 16 lanes.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "transpose_avx512.h"

namespace stemma {

constexpr int kRegisters = 32;
constexpr int kParts = 1;
typedef float FloatPart __attribute__((vector_size(64)));
typedef int32_t IntPart __attribute__((vector_size(64), may_alias));
typedef int16_t ShortPart __attribute__((vector_size(64), may_alias));

struct Halfwords {
    __m256i all;
};

inline FloatPart splat_part(float x) { return (FloatPart)_mm512_set1_ps(x); }
inline IntPart splat_part(int32_t x) { return (IntPart)_mm512_set1_epi32(x); }
inline FloatPart fmadd_part(FloatPart a, FloatPart b, FloatPart c) {
    return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
// sum += a * b. An instruction of its own: of an intrinsic's three forms, which leave the sum in the
// place of one operand or another, GCC 12 takes any, and copies registers back at a loop's end.
inline void accumulate_part(FloatPart& sum, FloatPart a, FloatPart b) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}
inline FloatPart max_part(FloatPart a, FloatPart b) {
    return (FloatPart)_mm512_max_ps((__m512)a, (__m512)b);
}
inline FloatPart min_part(FloatPart a, FloatPart b) {
    return (FloatPart)_mm512_min_ps((__m512)a, (__m512)b);
}
inline IntPart round_part(FloatPart x) { return (IntPart)_mm512_cvtps_epi32((__m512)x); }
// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of 16 bits each.
inline IntPart multiply_pairs(IntPart a, IntPart b) {
    return (IntPart)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
inline IntPart lookup_part(const int8_t (&table)[16], IntPart x) {
    const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return (IntPart)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), (__m512i)x);
}
inline IntPart lanes_part(Mask lanes) { return (IntPart)_mm512_movm_epi32(lanes); }
inline FloatPart load_part(const float* from, Mask lanes) {
    return (FloatPart)_mm512_maskz_loadu_ps(lanes, from);
}
inline IntPart load_part(const int32_t* from, Mask lanes) {
    return (IntPart)_mm512_maskz_loadu_epi32(lanes, from);
}
inline void store_part(float* to, FloatPart x, Mask lanes) {
    _mm512_mask_storeu_ps(to, lanes, (__m512)x);
}

inline Halfwords load_halfwords(const uint16_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
}
inline void store_halfwords(uint16_t* to, Halfwords x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.all);
}
inline void zero_extend_parts(Halfwords x, IntPart (&parts)[kParts]) {
    parts[0] = (IntPart)_mm512_cvtepu16_epi32(x.all);
}
// Signed.
inline void load_byte_parts(const void* from, IntPart (&parts)[kParts]) {
    parts[0] = (IntPart)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
// Of numbers below 2^16.
inline Halfwords narrow_parts(const IntPart (&parts)[kParts]) {
    return {_mm512_cvtepi32_epi16((__m512i)parts[0])};
}
inline void load_float16_parts(const void* from, FloatPart (&parts)[kParts]) {
    parts[0] = (FloatPart)_mm512_cvtph_ps(_mm256_load_si256(static_cast<const __m256i*>(from)));
}

inline void transpose_part(IntPart (&rows)[16]) { transpose_registers(rows); }

}  // namespace stemma
