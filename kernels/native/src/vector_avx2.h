// What vector_parts.h takes from AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstring>

namespace stemma {

constexpr int kRegisters = 8;
constexpr int kParts = 2;
typedef float FloatPart __attribute__((vector_size(32)));
typedef int32_t IntPart __attribute__((vector_size(32), may_alias));
typedef int16_t ShortPart __attribute__((vector_size(32), may_alias));

struct Halfwords {
    __m256i all;
};

inline FloatPart splat_part(float x) { return (FloatPart)_mm256_set1_ps(x); }
inline IntPart splat_part(int32_t x) { return (IntPart)_mm256_set1_epi32(x); }
inline FloatPart fmadd_part(FloatPart a, FloatPart b, FloatPart c) {
    return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
// sum += a * b. An instruction of its own: of an intrinsic's three forms, which leave the sum in the
// place of one operand or another, GCC 12 takes any, and copies registers back at a loop's end.
inline void accumulate_part(FloatPart& sum, FloatPart a, FloatPart b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}
inline FloatPart max_part(FloatPart a, FloatPart b) {
    return (FloatPart)_mm256_max_ps((__m256)a, (__m256)b);
}
inline FloatPart min_part(FloatPart a, FloatPart b) {
    return (FloatPart)_mm256_min_ps((__m256)a, (__m256)b);
}
inline IntPart round_part(FloatPart x) { return (IntPart)_mm256_cvtps_epi32((__m256)x); }
// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of 16 bits each.
inline IntPart multiply_pairs(IntPart a, IntPart b) {
    return (IntPart)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline IntPart lookup_part(const int8_t (&table)[16], IntPart x) {
    const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return (IntPart)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), (__m256i)x);
}
inline IntPart lanes_part(Mask lanes) {
    const IntPart bits = {1, 2, 4, 8, 16, 32, 64, 128};
    return (splat_part(static_cast<int32_t>(lanes)) & bits) != 0;
}
inline FloatPart load_part(const float* from, Mask lanes) {
    return (FloatPart)_mm256_maskload_ps(from, (__m256i)lanes_part(lanes));
}
inline IntPart load_part(const int32_t* from, Mask lanes) {
    return (IntPart)_mm256_maskload_epi32(from, (__m256i)lanes_part(lanes));
}
inline void store_part(float* to, FloatPart x, Mask lanes) {
    _mm256_maskstore_ps(to, (__m256i)lanes_part(lanes), (__m256)x);
}

inline Halfwords load_halfwords(const uint16_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
}
inline void store_halfwords(uint16_t* to, Halfwords x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.all);
}
inline void zero_extend_parts(Halfwords x, IntPart (&parts)[kParts]) {
    parts[0] = (IntPart)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x.all));
    parts[1] = (IntPart)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x.all, 1));
}
// Signed.
inline void load_byte_parts(const void* from, IntPart (&parts)[kParts]) {
    const __m128i all = _mm_loadu_si128(static_cast<const __m128i*>(from));
    parts[0] = (IntPart)_mm256_cvtepi8_epi32(all);
    parts[1] = (IntPart)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all));
}
// Of numbers below 2^16.
inline Halfwords narrow_parts(const IntPart (&parts)[kParts]) {
    const __m256i both = _mm256_packus_epi32((__m256i)parts[0], (__m256i)parts[1]);
    return {_mm256_permute4x64_epi64(both, 0xd8)};
}
inline void load_float16_parts(const void* from, FloatPart (&parts)[kParts]) {
    const auto* at = static_cast<const __m128i*>(from);
    parts[0] = (FloatPart)_mm256_cvtph_ps(_mm_load_si128(at));
    parts[1] = (FloatPart)_mm256_cvtph_ps(_mm_load_si128(at + 1));
}

inline void transpose_part(IntPart (&rows)[8]) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = (__m256i)rows[i];
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = (IntPart)_mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        rows[i + 4] = (IntPart)_mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
}

}  // namespace stemma
