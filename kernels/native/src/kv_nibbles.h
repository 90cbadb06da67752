// Keys and values in 4 bits: a number n becomes 16 + n, which bfloat16 has, by a shift, a mask and an
// or. What multiplies takes the 16 away again, of all products of a vector at once, with the vector's
// zero.
//
// Number i of a vector is in the low half of byte i, number i + head_dim / 2 in its high half; the two
// halves of a vector have a scale and a zero each. head_dim is a multiple of 32.
#pragma once

#include "hadamard.h"

namespace stemma {

struct NibbleKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr bool kIsTransformed = true;
    static constexpr bool kHasColumns = false;
    static constexpr int kPackedDims = 128;
    static constexpr float kAdded = 16.0f;
    static constexpr int32_t kFirstScaleCode = 107 << 3;  // reference/kv_store.py
    static int width(int head_dim) { return head_dim / 2; }

    // As of Bf16KV, with the dimensions in the order of `in_order`.
    template <class F>
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed, F&& between) {
        const int bytes = width(head_dim), num_words = bytes / 4;
        for (int group = 0; group < num_keys; group += 16)
            for (int word = 0; word < num_words; word += 16) {
                const int count = std::min(16, num_words - word);
                Ints rows[16];
                for (int i = 0; i < 16; ++i) {
                    const int64_t slot = slots[std::min(group + i, num_keys - 1)];
                    rows[i] = load_ints(keys + slot * bytes + word * 4, lanes_below(count));
                }
                transpose(rows);
                uint32_t* low = packed + word * 2 * kKeys + group;
                uint32_t* high = low + bytes / 2 * kKeys;
                for (int i = 0; i < count; ++i, low += 2 * kKeys, high += 2 * kKeys) {
                    store_ints(low, numbers(rows[i] << 3));
                    store_ints(low + kKeys, numbers(shift_right<5>(rows[i])));
                    store_ints(high, numbers(shift_right<1>(rows[i])));
                    store_ints(high + kKeys, numbers(shift_right<9>(rows[i])));
                }
                between();
            }
    }

    // As of Bf16KV; the missing half of an odd pair repeats the other, and meets a probability of 0.
    static void pack_values(const uint8_t* values, const int32_t* slots, int num_keys,
                            int head_dim, uint32_t* packed) {
        const int bytes = width(head_dim);
        for (int key = 0; key < num_keys; key += 2) {
            const uint8_t* even = values + static_cast<int64_t>(slots[key]) * bytes;
            const uint8_t* odd =
                values + static_cast<int64_t>(slots[std::min(key + 1, num_keys - 1)]) * bytes;
            uint32_t* to = packed + key / 2 * head_dim;
            for (int byte = 0; byte < bytes; byte += 16) {
                const Ints both =
                    (load_bytes(even + byte) & splat(0xff)) | load_bytes(odd + byte) << 16;
                store_ints(to + byte, numbers(both << 3));
                store_ints(to + bytes + byte, numbers(shift_right<1>(both)));
            }
        }
    }

    // The dimensions of a vector [head_dim] as the pairs of packed keys have them.
    static void in_order(const float* from, int head_dim, float* to) {
        for (int dim = 0; dim < head_dim; dim += 4)
            for (const int place : {0, 2, 1, 3}) *to++ = from[dim + place];
    }

    // Of the halves of vectors, from what is kept beside their numbers: scales, and what to add to sums
    // of packed numbers for each unit of the other factors' sums.
    static void unpack_range(Ints words, Floats (&scales)[2], Floats (&added)[2]) {
        const Ints byte = splat(0xff);
        const Ints codes[] = {words & byte, shift_right<8>(words) & byte};
        const Ints zeros[] = {shift_right<16>(words) & byte, shift_right<24>(words)};
        for (int half = 0; half < 2; ++half) {
            const Floats scale = as_floats((codes[half] + splat(kFirstScaleCode)) << 20);
            scales[half] = select(less(splat(254), codes[half]), splat(NAN), scale);
            added[half] = fnmadd(to_floats(zeros[half]), splat(0.125f), splat(8.0f - kAdded));
        }
    }

  private:
    // 16 + n in bfloat16 of a number n in bits 3 to 6 of each half.
    STEMMA_INLINE static Ints numbers(Ints bits) {
        return (bits & splat(0x00780078)) | splat(0x41804180);
    }
};

}  // namespace stemma
