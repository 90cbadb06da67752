// Products of bytes by NEON's of unsigned bytes by signed ones (Armv8.6).
#pragma once

namespace stemma {

// Products of unsigned bytes of weights, 4 a lane, by 4 inputs that all lanes share: signed bytes, or
// 16 bits as two bytes, 256 * high + low, whose products are summed apart.
using Weights = Ints;
STEMMA_INLINE Weights to_weights(Ints bytes) { return bytes; }

template <int kInputBytes>
constexpr int kProductSums = kInputBytes;

template <int kInputBytes>
struct Inputs {
    IntPart plane[kInputBytes];

    STEMMA_INLINE explicit Inputs(const char* from) {
        for (int p = 0; p < kInputBytes; ++p) {
            int32_t four;
            std::memcpy(&four, from + 4 * p, sizeof four);
            plane[p] = splat_part(four);
        }
    }
    STEMMA_INLINE void add_products(Ints (&sums)[kInputBytes], Weights weights) const {
        for (int p = 0; p < kInputBytes; ++p)
            STEMMA_EACH_PART
                sums[p].part[i] = add_bytes_part(sums[p].part[i], weights.part[i], plane[p]);
    }
};

STEMMA_INLINE Ints joined(const Ints (&sums)[1]) { return sums[0]; }
STEMMA_INLINE Ints joined(const Ints (&sums)[2]) { return (sums[0] << 8) + sums[1]; }

// 16 inputs of 16 bits as Inputs<2> reads them: four high bytes, then four low ones.
STEMMA_INLINE void store_inputs(char* to, Ints numbers) {
    int32_t all[16];
    store_ints(all, numbers);
    for (int i = 0; i < 16; ++i) {
        char* four = to + i / 4 * 8 + i % 4;
        four[0] = static_cast<char>((all[i] + 128) >> 8);
        four[4] = static_cast<char>(all[i]);  // the number - 256 * high
    }
}

}  // namespace stemma
