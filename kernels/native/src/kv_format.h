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

struct Bf16KV {
    using Number = bf16;
    static constexpr bool kIsScaled = false;
    static constexpr bool kIsTransformed = false;
    static int width(int head_dim) { return head_dim; }  // Numbers of a vector

    // keys -> packed [head_dim / 2, kKeys] pairs of dimensions; keys past the last repeat it.
    static void pack_keys(const bf16* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed) {
        const int num_pairs = head_dim / 2;
        for (int group = 0; group < num_keys; group += 16)
            for (int pair = 0; pair < num_pairs; pair += 16) {
                const int width = std::min(16, num_pairs - pair);
                Ints rows[16];
                for (int i = 0; i < 16; ++i) {
                    const int64_t slot = slots[std::min(group + i, num_keys - 1)];
                    const auto* from = reinterpret_cast<const uint32_t*>(keys + slot * head_dim);
                    rows[i] = load_ints(from + pair, lanes_below(width));
                }
                transpose(rows);
                for (int i = 0; i < width; ++i)
                    store_ints(packed + (pair + i) * kKeys + group, rows[i]);
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

#if defined(STEMMA_BF16_PRODUCTS)  // and VBMI
#include "kv_bytes_avx512.h"
#else
#include "kv_bytes.h"
#endif
#include "kv_nibbles.h"
