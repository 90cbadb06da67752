// How keys and values lie in the pool, and how they become what the products take: pairs of bfloat16.
// An 8-bit or 4-bit number becomes bfloat16 without loss; its scale is left to who multiplies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bf16.h"

namespace stemma {

// Mirrored by kv_format.py.
enum KVFormat : int32_t { kBf16 = 0, kInt8 = 1, kFp8 = 2, kInt4 = 3 };

constexpr int kKeys = 64;  // keys of a block

// [16 keys] pairs of dimensions from a place in each on -> packed [width, kKeys], width <= 16.
inline void pack_pairs(const uint32_t* const (&keys)[16], int from, int width, uint32_t* packed) {
    const Mask lanes = lanes_below(width);
    Ints rows[16];
    _Pragma("GCC unroll 16")
    for (int i = 0; i < 16; ++i) rows[i] = load_ints(keys[i] + from, lanes);
    transpose(rows);
    if (width == 16) {
        _Pragma("GCC unroll 16")
        for (int i = 0; i < 16; ++i) store_ints(packed + i * kKeys, rows[i]);
    } else {
        for (int i = 0; i < width; ++i) store_ints(packed + i * kKeys, rows[i]);
    }
}

struct Bf16KV {
    using Number = bf16;
    static constexpr bool kIsScaled = false;
    static constexpr bool kIsTransformed = false;
    static constexpr bool kHasColumns = true;
    static constexpr int kPackedDims = 32;
    static int width(int head_dim) { return head_dim; }  // Numbers of a vector

    // 16 numbers of two values, as step kStep of products takes them; no odd one: zeros.
    template <int kStep>
    STEMMA_INLINE static auto column(const bf16* even, const bf16* odd) {
        if constexpr (kPairSteps == 2)
            return load_bf16(kStep == 0 ? even : odd);
        else
            return zero_extend(load_halfwords(even)) |
                   (odd != nullptr ? zero_extend(load_halfwords(odd)) << 16 : zero_ints());
    }

    // keys -> packed [head_dim / 2, kKeys] pairs of dimensions; keys past the last repeat it. Calls
    // between() once for 16 keys by kPackedDims, or what is left of them.
    template <class F>
    static void pack_keys(const bf16* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed, F&& between) {
        const int num_pairs = head_dim / 2;
        for (int group = 0; group < num_keys; group += 16) {
            const uint32_t* from[16];
            for (int i = 0; i < 16; ++i) {
                const int64_t slot = slots[std::min(group + i, num_keys - 1)];
                from[i] = reinterpret_cast<const uint32_t*>(keys + slot * head_dim);
            }
            for (int pair = 0; pair < num_pairs; pair += 16) {
                pack_pairs(from, pair, std::min(16, num_pairs - pair),
                           packed + pair * kKeys + group);
                between();
            }
        }
    }

    // values -> packed [keys / 2, head_dim] pairs of keys; the missing half of an odd pair is zero.
    static void pack_values(const bf16* values, const int32_t* slots, int num_keys, int head_dim,
                            uint32_t* packed) {
        for (int key = 0; key < num_keys; key += 2) {
            const bf16* even = values + static_cast<int64_t>(slots[key]) * head_dim;
            const bool has_odd = key + 1 < num_keys;
            const bf16* odd =
                has_odd ? values + static_cast<int64_t>(slots[key + 1]) * head_dim : even;
            for (int dim = 0; dim < head_dim; dim += 16) {
                const Ints low = zero_extend(load_halfwords(even + dim));
                const Ints high = zero_extend(load_halfwords(odd + dim));
                store_ints(packed + key / 2 * head_dim + dim,
                           low | (has_odd ? high << 16 : zero_ints()));
            }
        }
    }
};

}  // namespace stemma

#if defined(STEMMA_AVX512) && defined(STEMMA_BF16_PRODUCTS)  // and VBMI
#include "kv_bytes_avx512.h"
#else
#include "kv_bytes.h"
#endif
#include "kv_nibbles.h"
