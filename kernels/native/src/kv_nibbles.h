// Keys and values in 4 bits: a number n becomes 16 + n, which bfloat16 has, by a shift, a mask and an
// or. What multiplies takes the 16 away again, of all products of a vector at once.
//
// Number i of a vector is in the low half of byte i, number i + head_dim / 2 in its high half.
#pragma once

#include "hadamard.h"

namespace stemma {

struct NibbleKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr bool kIsTransformed = true;
    static constexpr float kAdded = 16.0f;
    static int width(int head_dim) { return head_dim / 2; }

    // As of Bf16KV, with the dimensions in the order of `in_order`.
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed) {
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
                uint32_t* to = packed + word * 4 * kKeys + group;
                for (int i = 0; i < count; ++i, to += 4 * kKeys) {
                    store_ints(to, numbers(rows[i] << 3));
                    store_ints(to + kKeys, numbers(shift_right<5>(rows[i])));
                    store_ints(to + 2 * kKeys, numbers(shift_right<1>(rows[i])));
                    store_ints(to + 3 * kKeys, numbers(shift_right<9>(rows[i])));
                }
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
                const int count = std::min(16, bytes - byte);
                const Ints both = (load_some(even + byte, count) & splat(0xff)) |
                                  load_some(odd + byte, count) << 16;
                const Mask lanes = lanes_below(count);
                store_words(to + byte, numbers(both << 3), lanes);
                store_words(to + bytes + byte, numbers(shift_right<1>(both)), lanes);
            }
        }
    }

    // The dimensions of a vector [head_dim] as the pairs of packed keys have them.
    static void in_order(const float* from, int head_dim, float* to) {
        const int half = head_dim / 2;
        for (int dim = 0; dim < half; dim += 4)
            for (const int first : {dim, dim + half})
                for (const int place : {0, 2, 1, 3}) *to++ = from[first + place];
    }

  private:
    // 16 + n in bfloat16 of a number n in bits 3 to 6 of each half.
    STEMMA_INLINE static Ints numbers(Ints bits) {
        return (bits & splat(0x00780078)) | splat(0x41804180);
    }
    STEMMA_INLINE static Ints load_some(const uint8_t* from, int count) {
        if (count == 16) return load_bytes(from);
        uint8_t all[16] = {};
        std::copy(from, from + count, all);
        return load_bytes(all);
    }
    STEMMA_INLINE static void store_words(uint32_t* to, Ints words, Mask lanes) {
        store(reinterpret_cast<float*>(to), as_floats(words), lanes);
    }
};

}  // namespace stemma
