// Keys and values in 8 bits: words of four numbers are transposed, then become pairs of bfloat16.
#pragma once

namespace stemma {

// The numbers of 16 codes, signed bytes; bfloat16 has each of them.
template <KVFormat kFormat>
STEMMA_INLINE Floats numbers_of(Ints codes) {
    if constexpr (kFormat == kInt8) return to_floats(codes);
    // The fields of float8_e4m3fn where float32 has them, then the exponents' biases, 7 and 127.
    const Floats sized = as_floats((codes & splat(0x7f)) << 20) * splat(0x1p120f);
    return as_floats(as_ints(sized) | (codes & splat(0x80)) << 24);
}

template <KVFormat kFormat>
STEMMA_INLINE Floats load_numbers(const uint8_t* from) {
    return numbers_of<kFormat>(load_bytes(from));
}

// int8 or float8_e4m3fn.
template <KVFormat kFormat>
struct ByteKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr bool kIsTransformed = false;
    static constexpr bool kHasColumns = kPairSteps == 2;
    static constexpr int kPackedDims = 64;
    static int width(int head_dim) { return head_dim; }

    // As of Bf16KV.
    template <int kStep>
    STEMMA_INLINE static Floats column(const uint8_t* even, const uint8_t* odd) {
        return load_numbers<kFormat>(kStep == 0 ? even : odd);
    }

    // As of Bf16KV.
    template <class F>
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed, F&& between) {
        const int num_words = head_dim / 4;
        for (int group = 0; group < num_keys; group += 16) {
            const uint8_t* from[16];
            for (int i = 0; i < 16; ++i) {
                const int64_t slot = slots[std::min(group + i, num_keys - 1)];
                from[i] = keys + slot * head_dim;
            }
            for (int word = 0; word < num_words; word += 16) {
                const int count = std::min(16, num_words - word);
                Ints rows[16];
                _Pragma("GCC unroll 16")
                for (int i = 0; i < 16; ++i)
                    rows[i] = load_ints(from[i] + word * 4, lanes_below(count));
                transpose(rows);
                uint32_t* to = packed + word * 2 * kKeys + group;
                for (int i = 0; i < count; ++i, to += 2 * kKeys) {
                    store_ints(to, pair(byte_of<0>(rows[i]), byte_of<1>(rows[i])));
                    store_ints(to + kKeys, pair(byte_of<2>(rows[i]), byte_of<3>(rows[i])));
                }
                between();
            }
        }
    }

    static void pack_values(const uint8_t* values, const int32_t* slots, int num_keys,
                            int head_dim, uint32_t* packed) {
        for (int key = 0; key < num_keys; key += 2) {
            const uint8_t* even = values + static_cast<int64_t>(slots[key]) * head_dim;
            const bool has_odd = key + 1 < num_keys;
            const uint8_t* odd =
                has_odd ? values + static_cast<int64_t>(slots[key + 1]) * head_dim : even;
            for (int dim = 0; dim < head_dim; dim += 16) {
                const Floats low = load_numbers<kFormat>(even + dim);
                const Floats high = has_odd ? load_numbers<kFormat>(odd + dim) : zero_floats();
                store_ints(packed + key / 2 * head_dim + dim, pair(low, high));
            }
        }
    }

  private:
    // The number in a byte of each lane.
    template <int kByte>
    STEMMA_INLINE static Floats byte_of(Ints words) {
        return numbers_of<kFormat>(shift_right_signed<24>(words << (24 - 8 * kByte)));
    }
    // Two numbers that bfloat16 has.
    STEMMA_INLINE static Ints pair(Floats first, Floats second) {
        return shift_right<16>(as_ints(first)) |
               (as_ints(second) & splat(static_cast<int32_t>(0xffff0000)));
    }
};

}  // namespace stemma
