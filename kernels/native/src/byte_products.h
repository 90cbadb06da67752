// Products of bytes, widened to 16 bits: for CPUs that do not multiply bytes.
#pragma once

namespace stemma {

// Products of unsigned bytes of weights, 4 a lane, by 4 inputs that all lanes share, of 8 or 16 bits:
// pairs of 16 bits, the first and third, and the second and fourth.
struct Weights {
    Ints even, odd;
};
STEMMA_INLINE Weights to_weights(Ints bytes) {
    const Ints low = splat(0x00ff00ff);
    return {bytes & low, shift_right<8>(bytes) & low};
}

template <int kInputBytes>
constexpr int kProductSums = 1;

template <int kInputBytes>
struct Inputs {
    Ints even, odd;

    STEMMA_INLINE explicit Inputs(const char* from) {
        int32_t first, second;
        std::memcpy(&first, from, sizeof first);
        if constexpr (kInputBytes == 2) {
            std::memcpy(&second, from + sizeof first, sizeof second);
            even = splat(first);
            odd = splat(second);
        } else {
            const Ints bytes = splat(first);
            STEMMA_EACH_PART even.part[i] = (IntPart)(((ShortPart)bytes.part[i] << 8) >> 8);
            STEMMA_EACH_PART odd.part[i] = (IntPart)((ShortPart)bytes.part[i] >> 8);
        }
    }
    STEMMA_INLINE void add_products(Ints (&sums)[1], Weights weights) const {
        STEMMA_EACH_PART sums[0].part[i] += multiply_pairs(weights.even.part[i], even.part[i]) +
                                            multiply_pairs(weights.odd.part[i], odd.part[i]);
    }
};

STEMMA_INLINE Ints joined(const Ints (&sums)[1]) { return sums[0]; }

// 16 inputs of 16 bits as Inputs<2> reads them.
STEMMA_INLINE void store_inputs(char* to, Ints numbers) {
    int32_t all[16];
    int16_t pairs[16];
    store_ints(all, numbers);
    for (int i = 0; i < 16; i += 4) {
        pairs[i] = static_cast<int16_t>(all[i]);
        pairs[i + 1] = static_cast<int16_t>(all[i + 2]);
        pairs[i + 2] = static_cast<int16_t>(all[i + 1]);
        pairs[i + 3] = static_cast<int16_t>(all[i + 3]);
    }
    std::memcpy(to, pairs, sizeof pairs);
}

}  // namespace stemma
