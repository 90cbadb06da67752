// Pairs of bfloat16 where the CPU multiplies them by itself.
#pragma once

#include <cstring>

namespace stemma {

// Two numbers that all lanes share, and in each lane two: their products are added to sums.
using Pair = uint32_t;
constexpr int kPairSteps = 1;
template <int>
STEMMA_INLINE Ints column_of(Ints pairs) {
    return pairs;
}
template <int>
STEMMA_INLINE Floats add_products(Floats sum, Ints column, Pair pair) {
    return add_pair_products(sum, column, splat(static_cast<int32_t>(pair)));
}
// 16 numbers.
STEMMA_INLINE void store_pairs(Pair* to, Floats x) {
    store_halfwords(reinterpret_cast<uint16_t*>(to), narrow(x));
}
// count: of numbers, a multiple of 2.
inline void copy_pairs(const bf16* from, int64_t count, Pair* to) {
    std::memcpy(to, from, sizeof(bf16) * count);
}
constexpr bool kPairsAreBf16 = true;

}  // namespace stemma
