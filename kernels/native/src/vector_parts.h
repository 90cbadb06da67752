// vector.h where 16 lanes are parts, each a register.
#pragma once

#include <cmath>
#include <cstring>

namespace stemma {

constexpr int kPartLanes = 16 / kParts;
constexpr Mask kPartMask = (1u << kPartLanes) - 1;

struct Floats {
    FloatPart part[kParts];
};
struct Ints {
    IntPart part[kParts];
};
struct Choice {
    IntPart part[kParts];
};

#define STEMMA_EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)
#define STEMMA_OPERATOR(Type, op)                                \
    STEMMA_INLINE Type operator op(Type a, Type b) {             \
        Type c;                                                  \
        STEMMA_EACH_PART c.part[i] = a.part[i] op b.part[i];     \
        return c;                                                \
    }
#define STEMMA_BINARY(Type, name, expression)                    \
    STEMMA_INLINE Type name(Type a, Type b) {                    \
        Type c;                                                  \
        STEMMA_EACH_PART c.part[i] = expression;                 \
        return c;                                                \
    }
#define STEMMA_UNARY(To, name, From, expression)                 \
    STEMMA_INLINE To name(From a) {                              \
        To c;                                                    \
        STEMMA_EACH_PART c.part[i] = expression;                 \
        return c;                                                \
    }
#define STEMMA_COMPARISON(Type, name, expression)                \
    STEMMA_INLINE Choice name(Type a, Type b) {                  \
        Choice c;                                                \
        STEMMA_EACH_PART c.part[i] = (IntPart)(expression);      \
        return c;                                                \
    }

STEMMA_UNARY(Floats, splat, float, splat_part(a))
STEMMA_UNARY(Ints, splat, int32_t, splat_part(a))
STEMMA_INLINE Floats zero_floats() { return Floats{}; }
STEMMA_INLINE Ints zero_ints() { return Ints{}; }

STEMMA_OPERATOR(Floats, +)
STEMMA_OPERATOR(Floats, -)
STEMMA_OPERATOR(Floats, *)
STEMMA_OPERATOR(Floats, /)
// Integers wrap around.
typedef uint32_t UnsignedPart __attribute__((vector_size(sizeof(IntPart))));
STEMMA_BINARY(Ints, operator+, (IntPart)((UnsignedPart)a.part[i] + (UnsignedPart)b.part[i]))
STEMMA_BINARY(Ints, operator-, (IntPart)((UnsignedPart)a.part[i] - (UnsignedPart)b.part[i]))
STEMMA_OPERATOR(Ints, &)
STEMMA_OPERATOR(Ints, |)
STEMMA_BINARY(Floats, max, max_part(a.part[i], b.part[i]))
STEMMA_BINARY(Floats, min, min_part(a.part[i], b.part[i]))
STEMMA_BINARY(Ints, max, (a.part[i] > b.part[i] ? a.part[i] : b.part[i]))
STEMMA_BINARY(Ints, min, (a.part[i] < b.part[i] ? a.part[i] : b.part[i]))
STEMMA_COMPARISON(Floats, less, a.part[i] < b.part[i])
STEMMA_COMPARISON(Ints, less, a.part[i] < b.part[i])
STEMMA_UNARY(Choice, is_number, Floats, (IntPart)(a.part[i] == a.part[i]))
STEMMA_UNARY(Choice, choice, Mask, lanes_part(a >> (i * kPartLanes) & kPartMask))
STEMMA_UNARY(Ints, as_ints, Floats, (IntPart)a.part[i])
STEMMA_UNARY(Floats, as_floats, Ints, (FloatPart)a.part[i])
STEMMA_UNARY(Floats, abs, Floats, (FloatPart)((IntPart)a.part[i] & 0x7fffffff))
STEMMA_UNARY(Ints, round_to_ints, Floats, round_part(a.part[i]))
STEMMA_UNARY(Floats, to_floats, Ints, __builtin_convertvector(a.part[i], FloatPart))

STEMMA_INLINE Ints operator<<(Ints a, int bits) {
    STEMMA_EACH_PART a.part[i] = a.part[i] << bits;
    return a;
}
template <int kBits>
STEMMA_INLINE Ints shift_right(Ints x) {
    STEMMA_EACH_PART x.part[i] = (IntPart)((UnsignedPart)x.part[i] >> kBits);
    return x;
}
template <int kBits>
STEMMA_INLINE Ints shift_right_signed(Ints x) {
    STEMMA_EACH_PART x.part[i] = x.part[i] >> kBits;
    return x;
}
STEMMA_INLINE Floats fmadd(Floats a, Floats b, Floats c) {
    STEMMA_EACH_PART c.part[i] = fmadd_part(a.part[i], b.part[i], c.part[i]);
    return c;
}
// sum + column * number, for long chains of them (accumulate_part).
STEMMA_INLINE Floats add_product(Floats sum, Floats column, float number) {
    const FloatPart all = splat_part(number);
    STEMMA_EACH_PART accumulate_part(sum.part[i], column.part[i], all);
    return sum;
}
STEMMA_INLINE Floats fmsub(Floats a, Floats b, Floats c) {
    STEMMA_EACH_PART c.part[i] = fmadd_part(a.part[i], b.part[i], -c.part[i]);
    return c;
}
STEMMA_INLINE Floats fnmadd(Floats a, Floats b, Floats c) {
    STEMMA_EACH_PART c.part[i] = fmadd_part(-a.part[i], b.part[i], c.part[i]);
    return c;
}
STEMMA_INLINE Floats select(Choice at, Floats yes, Floats no) {
    STEMMA_EACH_PART yes.part[i] = at.part[i] ? yes.part[i] : no.part[i];
    return yes;
}
STEMMA_INLINE Ints select(Choice at, Ints yes, Ints no) {
    STEMMA_EACH_PART yes.part[i] = at.part[i] ? yes.part[i] : no.part[i];
    return yes;
}

// Memory that need not be aligned. (A copy of the whole goes through memory in pieces.)
typedef float LooseFloats __attribute__((vector_size(sizeof(FloatPart)), aligned(4), may_alias));
typedef int32_t LooseInts __attribute__((vector_size(sizeof(IntPart)), aligned(4), may_alias));

STEMMA_INLINE Floats load(const float* from) {
    Floats x;
    STEMMA_EACH_PART x.part[i] = reinterpret_cast<const LooseFloats*>(from)[i];
    return x;
}
STEMMA_INLINE Floats load(const float* from, Mask lanes) {
    if (lanes == 0xffff) return load(from);
    Floats x;
    STEMMA_EACH_PART x.part[i] =
        load_part(from + i * kPartLanes, lanes >> (i * kPartLanes) & kPartMask);
    return x;
}
STEMMA_INLINE Ints load_ints(const void* from) {
    Ints x;
    STEMMA_EACH_PART x.part[i] = static_cast<const LooseInts*>(from)[i];
    return x;
}
// Up to 32 numbers, two a lane; zero past the last.
STEMMA_INLINE Ints load_pairs(const bf16* from, int64_t count) {
    if (count == 32) return load_ints(from);
    bf16 all[32] = {};
    std::memcpy(all, from, sizeof(bf16) * count);
    return load_ints(all);
}
STEMMA_INLINE Ints load_ints(const void* from, Mask lanes) {
    if (lanes == 0xffff) return load_ints(from);
    Ints x;
    STEMMA_EACH_PART x.part[i] = load_part(static_cast<const int32_t*>(from) + i * kPartLanes,
                                           lanes >> (i * kPartLanes) & kPartMask);
    return x;
}
// lanes: the first ones.
STEMMA_INLINE Halfwords load_halfwords(const uint16_t* from, Mask lanes) {
    if (lanes == 0xffff) return load_halfwords(from);
    uint16_t all[16] = {};
    std::memcpy(all, from, sizeof(uint16_t) * __builtin_popcount(lanes));
    return load_halfwords(all);
}
STEMMA_INLINE Floats load_float16(const void* from) {
    Floats x;
    load_float16_parts(from, x.part);
    return x;
}
STEMMA_INLINE Floats gather(const float* from, const int32_t* at, Mask lanes) {
    float all[16] = {};
    if (lanes == 0xffff) {
        _Pragma("GCC unroll 16")
        for (int lane = 0; lane < 16; ++lane) all[lane] = from[at[lane]];
    } else {
        for (int lane = 0; lanes >> lane; ++lane)
            if (lanes >> lane & 1) all[lane] = from[at[lane]];
    }
    return load(all);
}
// 4 bytes a lane, `stride` times 4 bytes from each other.
STEMMA_INLINE Ints gather_strided(const void* from, int32_t stride, Mask lanes) {
    int32_t all[16] = {};
    for (int lane = 0; lanes >> lane; ++lane)
        std::memcpy(all + lane, static_cast<const char*>(from) + 4l * lane * stride, 4);
    return load_ints(all);
}

STEMMA_INLINE void store(float* to, Floats x) {
    STEMMA_EACH_PART reinterpret_cast<LooseFloats*>(to)[i] = x.part[i];
}
STEMMA_INLINE void store(float* to, Floats x, Mask lanes) {
    if (lanes == 0xffff) return store(to, x);
    STEMMA_EACH_PART store_part(to + i * kPartLanes, x.part[i],
                                lanes >> (i * kPartLanes) & kPartMask);
}
STEMMA_INLINE void store_ints(void* to, Ints x) {
    STEMMA_EACH_PART static_cast<LooseInts*>(to)[i] = x.part[i];
}
// lanes: the first ones.
STEMMA_INLINE void store_halfwords(uint16_t* to, Halfwords x, Mask lanes) {
    if (lanes == 0xffff) return store_halfwords(to, x);
    uint16_t all[16];
    store_halfwords(all, x);
    std::memcpy(to, all, sizeof(uint16_t) * __builtin_popcount(lanes));
}
// lanes: the first ones.
STEMMA_INLINE void store_bytes(void* to, Ints x, Mask lanes) {
    int32_t all[16];
    uint8_t bytes[16];
    store_ints(all, x);
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(all[i]);
    std::memcpy(to, bytes, __builtin_popcount(lanes));
}

STEMMA_INLINE Ints zero_extend(Halfwords x) {
    Ints wide;
    zero_extend_parts(x, wide.part);
    return wide;
}
// 16 signed bytes.
STEMMA_INLINE Ints load_bytes(const void* from) {
    Ints wide;
    load_byte_parts(from, wide.part);
    return wide;
}
// To bfloat16, to nearest, ties to even; NaN stays NaN.
STEMMA_INLINE Halfwords narrow(Floats x) {
#if defined(STEMMA_BF16_PRODUCTS)
    return narrow_floats(x.part);
#else
    const Ints bits = as_ints(x);
    const Ints rounded = bits + splat(0x7fff) + (shift_right<16>(bits) & splat(1));
    const Ints wide = select(is_number(x), rounded, bits | splat(0x400000));
    return narrow_parts(shift_right<16>(wide).part);
#endif
}

STEMMA_INLINE float sum_of(Floats x) {
    FloatPart all = x.part[0];
    for (int i = 1; i < kParts; ++i) all = all + x.part[i];
    float sum = 0.0f;
    for (int i = 0; i < kPartLanes; ++i) sum += all[i];
    return sum;
}
STEMMA_INLINE float largest_of(Floats x) {
    FloatPart all = x.part[0];
    for (int i = 1; i < kParts; ++i) all = max_part(all, x.part[i]);
    float largest = all[0];
    for (int i = 1; i < kPartLanes; ++i) largest = all[i] > largest ? all[i] : largest;
    return largest;
}
STEMMA_INLINE int32_t sum_of(Ints x) {
    uint32_t sum = 0;
    STEMMA_EACH_PART for (int lane = 0; lane < kPartLanes; ++lane)
        sum += static_cast<uint32_t>(x.part[i][lane]);
    return static_cast<int32_t>(sum);
}
STEMMA_INLINE int32_t largest_of(Ints x) {
    int32_t largest = x.part[0][0];
    STEMMA_EACH_PART for (int lane = 0; lane < kPartLanes; ++lane)
        largest = x.part[i][lane] > largest ? x.part[i][lane] : largest;
    return largest;
}
STEMMA_INLINE float first_of(Floats x) { return x.part[0][0]; }
STEMMA_INLINE Floats splat_lane(Floats x, int lane) {
    return splat(x.part[lane / kPartLanes][lane % kPartLanes]);
}

#if defined(STEMMA_BF16_PRODUCTS)

// sum + the products of two numbers in bfloat16 a lane.
STEMMA_INLINE Floats add_pair_products(Floats sum, Ints a, Ints b) {
    STEMMA_EACH_PART sum.part[i] = add_pairs_part(sum.part[i], a.part[i], b.part[i]);
    return sum;
}

#else

// sum + the products of two numbers in bfloat16 a lane, the first and the second half of its bits.
STEMMA_INLINE Floats add_pair_products(Floats sum, Ints a, Ints b) {
    const Ints second = splat(static_cast<int32_t>(0xffff0000));
    sum = fmadd(as_floats(a << 16), as_floats(b << 16), sum);
    return fmadd(as_floats(a & second), as_floats(b & second), sum);
}

// Two numbers that all lanes share, and in each lane two of bfloat16: their products are added to sums.
// One after the other, so that fewer registers are taken.
struct Pair {
    float number[2];
};
constexpr int kPairSteps = 2;
template <int kStep>
STEMMA_INLINE Floats column_of(Ints pairs) {
    return as_floats(kStep == 0 ? pairs << 16 : pairs & splat(static_cast<int32_t>(0xffff0000)));
}
template <int kStep>
STEMMA_INLINE Floats add_products(Floats sum, Floats column, const Pair& pair) {
    return add_product(sum, column, pair.number[kStep]);
}
// 16 numbers.
STEMMA_INLINE void store_pairs(Pair* to, Floats x) { store(to->number, x); }
// count: of numbers, a multiple of 2.
inline void copy_pairs(const bf16* from, int64_t count, Pair* to) {
    for (int64_t i = 0; i < count; i += 16) {
        const Mask lanes = lanes_below(count - i);
        const Halfwords numbers = load_halfwords(from + i, lanes);
        store(to[i / 2].number, as_floats(zero_extend(numbers) << 16), lanes);
    }
}
constexpr bool kPairsAreBf16 = false;

#endif

STEMMA_INLINE void transpose(Ints (&rows)[16]) {
    Ints from[16];
    for (int i = 0; i < 16; ++i) from[i] = rows[i];
    for (int i = 0; i < kParts; ++i)
        for (int j = 0; j < kParts; ++j) {
            IntPart block[kPartLanes];
            for (int k = 0; k < kPartLanes; ++k) block[k] = from[i * kPartLanes + k].part[j];
            transpose_part(block);
            for (int k = 0; k < kPartLanes; ++k) rows[j * kPartLanes + k].part[i] = block[k];
        }
}

// Every byte of x, from 0 to 15, replaced by that place of the table.
STEMMA_INLINE Ints lookup(const int8_t (&table)[16], Ints x) {
    STEMMA_EACH_PART x.part[i] = lookup_part(table, x.part[i]);
    return x;
}

}  // namespace stemma
