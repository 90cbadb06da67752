// Products of bytes by AVX512-VNNI, for both ways of AVX512.
#pragma once

namespace stemma {

inline __m512i& register_of(Ints& x) { return reinterpret_cast<__m512i&>(x); }

// Products of unsigned bytes of weights, 4 a lane, by 4 inputs that all lanes share: signed bytes, or
// 16 bits as two bytes, 256 * high + low, whose products are summed apart.
using Weights = Ints;
inline Weights to_weights(Ints bytes) { return bytes; }

template <int kInputBytes>
constexpr int kProductSums = kInputBytes;

template <int kInputBytes>
struct Inputs {
    __m512i plane[kInputBytes];

    explicit Inputs(const char* from) {
#pragma GCC unroll 2
        for (int p = 0; p < kInputBytes; ++p)
            plane[p] = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(from + 4 * p));
    }
    // By vpdpbusd, of whose intrinsic GCC 12 copies every sum to another register and back.
    void add_products(Ints (&sums)[kInputBytes], Weights weights) const {
#pragma GCC unroll 2
        for (int p = 0; p < kInputBytes; ++p) {
            __m512i sum = register_of(sums[p]);
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(register_of(weights)), "v"(plane[p]));
            register_of(sums[p]) = sum;
        }
    }
};

inline Ints joined(const Ints (&sums)[1]) { return sums[0]; }
inline Ints joined(const Ints (&sums)[2]) { return (sums[0] << 8) + sums[1]; }

// 16 inputs of 16 bits as Inputs<2> reads them.
inline void store_inputs(char* to, Ints numbers) {
    const __m512i all = register_of(numbers);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8);
    const __m128i highs = _mm512_cvtepi32_epi8(high);
    const __m128i lows = _mm512_cvtepi32_epi8(all);  // the low byte is number - 256 * high
    auto* out = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(out, _mm_unpacklo_epi32(highs, lows));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi32(highs, lows));
}

}  // namespace stemma
