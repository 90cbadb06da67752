// Keys and values in 8 bits: keys become rows of bfloat16, which are packed as those are; of values
// two rows at a time become pairs.
#pragma once

namespace stemma {

// 16 numbers, each of which bfloat16 has too.
template <KVFormat kFormat>
inline Floats load_numbers(const uint8_t* from) {
    const Ints codes = load_bytes(from);
    if constexpr (kFormat == kInt8) return to_floats(codes);
    // The fields of float8_e4m3fn where float32 has them, then the exponents' biases, 7 and 127.
    const Floats sized = as_floats((codes & splat(0x7f)) << 20) * splat(0x1p120f);
    return as_floats(as_ints(sized) | (codes & splat(0x80)) << 24);
}

// int8 or float8_e4m3fn.
template <KVFormat kFormat>
struct ByteKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr bool kIsTransformed = false;
    static int width(int head_dim) { return head_dim; }

    // As of Bf16KV.
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed) {
        const Rows rows(keys, slots, num_keys, head_dim);
        Bf16KV::pack_keys(rows.at, rows.places, num_keys, head_dim, packed);
    }
    static void pack_values(const uint8_t* values, const int32_t* slots, int num_keys,
                            int head_dim, uint32_t* packed) {
        const Ints second = splat(static_cast<int32_t>(0xffff0000));
        for (int key = 0; key < num_keys; key += 2) {
            const uint8_t* even = values + static_cast<int64_t>(slots[key]) * head_dim;
            const bool has_odd = key + 1 < num_keys;
            const uint8_t* odd =
                has_odd ? values + static_cast<int64_t>(slots[key + 1]) * head_dim : even;
            for (int dim = 0; dim < head_dim; dim += 16) {
                const Ints low = shift_right<16>(as_ints(load_numbers<kFormat>(even + dim)));
                const Ints high = as_ints(load_numbers<kFormat>(odd + dim)) & second;
                store_ints(packed + key / 2 * head_dim + dim,
                           low | (has_odd ? high : zero_ints()));
            }
        }
    }

  private:
    struct Rows {
        const bf16* at;  // [num_keys, head_dim]
        int32_t places[kKeys];

        Rows(const uint8_t* numbers, const int32_t* slots, int num_keys, int head_dim) {
            thread_local std::vector<bf16> all;
            if (all.size() < static_cast<size_t>(kKeys * head_dim)) all.resize(kKeys * head_dim);
            at = all.data();
            for (int key = 0; key < num_keys; ++key) {
                places[key] = key;
                const uint8_t* from = numbers + static_cast<int64_t>(slots[key]) * head_dim;
                for (int dim = 0; dim < head_dim; dim += 16)
                    store_halfwords(all.data() + key * head_dim + dim,
                                    narrow_exactly(load_numbers<kFormat>(from + dim)));
            }
        }
    };
};

}  // namespace stemma
