// Keys and values in 8 bits: they become rows of bfloat16, which are packed as those are.
#pragma once

namespace stemma {

// 16 numbers in bfloat16, without loss.
template <KVFormat kFormat>
inline Halfwords to_bf16(const uint8_t* from) {
    int32_t codes[16];
    for (int i = 0; i < 16; ++i)
        codes[i] = kFormat == kInt8 ? static_cast<int8_t>(from[i]) : from[i];
    const Ints numbers = load_ints(codes);
    if constexpr (kFormat == kInt8) return narrow(to_floats(numbers));
    // The fields of float8_e4m3fn where float32 has them, then the exponents' biases, 7 and 127.
    const Ints magnitude = (numbers & splat(0x7f)) << 20;
    const Floats sized = as_floats(magnitude) * splat(0x1p120f);
    return narrow(as_floats(as_ints(sized) | (numbers & splat(0x80)) << 24));
}

// int8 or float8_e4m3fn.
template <KVFormat kFormat>
struct ByteKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;

    // As of Bf16KV.
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed) {
        const Rows rows(keys, slots, num_keys, head_dim);
        Bf16KV::pack_keys(rows.at, rows.places, num_keys, head_dim, packed);
    }
    static void pack_values(const uint8_t* values, const int32_t* slots, int num_keys,
                            int head_dim, uint32_t* packed) {
        const Rows rows(values, slots, num_keys, head_dim);
        Bf16KV::pack_values(rows.at, rows.places, num_keys, head_dim, packed);
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
                    store_halfwords(all.data() + key * head_dim + dim, to_bf16<kFormat>(from + dim));
            }
        }
    };
};

}  // namespace stemma
