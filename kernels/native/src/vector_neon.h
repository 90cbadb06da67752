// What vector_parts.h takes from NEON of 64-bit ARM, with products of bfloat16 and of bytes (Armv8.6) or
// without.
#pragma once

#include <arm_neon.h>

#include <cstring>

namespace stemma {

constexpr int kRegisters = 8;
constexpr int kParts = 4;
typedef float FloatPart __attribute__((vector_size(16)));
typedef int32_t IntPart __attribute__((vector_size(16), may_alias));
typedef int16_t ShortPart __attribute__((vector_size(16), may_alias));

struct Halfwords {
    uint16x8_t half[2];
};

inline FloatPart splat_part(float x) { return (FloatPart)vdupq_n_f32(x); }
inline IntPart splat_part(int32_t x) { return (IntPart)vdupq_n_s32(x); }
inline FloatPart fmadd_part(FloatPart a, FloatPart b, FloatPart c) {
    return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline void accumulate_part(FloatPart& sum, FloatPart a, FloatPart b) {
    sum = fmadd_part(a, b, sum);
}
// Of a NaN and a number the second, as on other CPUs.
inline FloatPart max_part(FloatPart a, FloatPart b) { return a > b ? a : b; }
inline FloatPart min_part(FloatPart a, FloatPart b) { return a < b ? a : b; }
inline IntPart round_part(FloatPart x) { return (IntPart)vcvtnq_s32_f32((float32x4_t)x); }
// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of 16 bits each.
inline IntPart multiply_pairs(IntPart a, IntPart b) {
    const auto left = (int16x8_t)a, right = (int16x8_t)b;
    return (IntPart)vpaddq_s32(vmull_s16(vget_low_s16(left), vget_low_s16(right)),
                               vmull_high_s16(left, right));
}
inline IntPart lookup_part(const int8_t (&table)[16], IntPart x) {
    return (IntPart)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)x);
}
inline IntPart lanes_part(Mask lanes) {
    const IntPart bits = {1, 2, 4, 8};
    return (splat_part(static_cast<int32_t>(lanes)) & bits) != 0;
}
// Nothing outside of the lanes is touched.
inline FloatPart load_part(const float* from, Mask lanes) {
    FloatPart all = {};
    for (int i = 0; i < 4; ++i)
        if (lanes >> i & 1) all[i] = from[i];
    return all;
}
inline IntPart load_part(const int32_t* from, Mask lanes) {
    IntPart all = {};
    for (int i = 0; i < 4; ++i)
        if (lanes >> i & 1) all[i] = from[i];
    return all;
}
inline void store_part(float* to, FloatPart x, Mask lanes) {
    for (int i = 0; i < 4; ++i)
        if (lanes >> i & 1) to[i] = x[i];
}

inline Halfwords load_halfwords(const uint16_t* from) {
    return {{vld1q_u16(from), vld1q_u16(from + 8)}};
}
inline void store_halfwords(uint16_t* to, Halfwords x) {
    vst1q_u16(to, x.half[0]);
    vst1q_u16(to + 8, x.half[1]);
}
inline void zero_extend_parts(Halfwords x, IntPart (&parts)[kParts]) {
    for (int i = 0; i < 2; ++i) {
        parts[2 * i] = (IntPart)vmovl_u16(vget_low_u16(x.half[i]));
        parts[2 * i + 1] = (IntPart)vmovl_high_u16(x.half[i]);
    }
}
// Signed.
inline void load_byte_parts(const void* from, IntPart (&parts)[kParts]) {
    const int8x16_t all = vld1q_s8(static_cast<const int8_t*>(from));
    const int16x8_t half[2] = {vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all)};
    for (int i = 0; i < 2; ++i) {
        parts[2 * i] = (IntPart)vmovl_s16(vget_low_s16(half[i]));
        parts[2 * i + 1] = (IntPart)vmovl_high_s16(half[i]);
    }
}
// Of numbers below 2^16.
inline Halfwords narrow_parts(const IntPart (&parts)[kParts]) {
    Halfwords x;
    for (int i = 0; i < 2; ++i)
        x.half[i] = vuzp1q_u16((uint16x8_t)parts[2 * i], (uint16x8_t)parts[2 * i + 1]);
    return x;
}
inline void load_float16_parts(const void* from, FloatPart (&parts)[kParts]) {
    const auto* at = static_cast<const float16_t*>(from);
    for (int i = 0; i < kParts; ++i) parts[i] = (FloatPart)vcvt_f32_f16(vld1_f16(at + 4 * i));
}

#if defined(STEMMA_BF16_PRODUCTS)
// sum + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of bfloat16.
inline FloatPart add_pairs_part(FloatPart sum, IntPart a, IntPart b) {
    return (FloatPart)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)a),
                                  vreinterpretq_bf16_s32((int32x4_t)b));
}
// sum + 4 products of unsigned bytes by signed ones.
inline IntPart add_bytes_part(IntPart sum, IntPart weights, IntPart inputs) {
    return (IntPart)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)inputs);
}
// To bfloat16, to nearest, ties to even; NaN stays NaN.
inline Halfwords narrow_floats(const FloatPart (&parts)[kParts]) {
    Halfwords x;
    for (int i = 0; i < 2; ++i) {
        const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)parts[2 * i]);
        x.half[i] = vreinterpretq_u16_bf16(
            vcvtq_high_bf16_f32(low, (float32x4_t)parts[2 * i + 1]));
    }
    return x;
}
#endif

inline void transpose_part(IntPart (&rows)[4]) {
    const auto row = [&rows](int i) { return (int32x4_t)rows[i]; };
    const int32x4_t a = vtrn1q_s32(row(0), row(1)), b = vtrn2q_s32(row(0), row(1));
    const int32x4_t c = vtrn1q_s32(row(2), row(3)), d = vtrn2q_s32(row(2), row(3));
    const auto first = [](int32x4_t x, int32x4_t y) {
        return (IntPart)vtrn1q_s64((int64x2_t)x, (int64x2_t)y);
    };
    const auto second = [](int32x4_t x, int32x4_t y) {
        return (IntPart)vtrn2q_s64((int64x2_t)x, (int64x2_t)y);
    };
    rows[0] = first(a, c);
    rows[1] = first(b, d);
    rows[2] = second(a, c);
    rows[3] = second(b, d);
}

}  // namespace stemma
