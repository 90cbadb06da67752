// Keys and values in 8 bits, by AVX512-VBMI: 64 numbers at a time are two table lookups and a sign.
#pragma once

namespace stemma {

// The first `count` of 64 bytes.
inline __mmask64 bytes_below(int count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

// The bytes of the bfloat16 of every 8-bit magnitude, low and high; of int8 up to 127, of the floats
// (float8_e4m3fn: 4 bits of exponent with bias 7, 3 of fraction) all but NaN, which is not kept.
struct ByteTables {
    alignas(64) uint8_t low[128] = {};
    alignas(64) uint8_t high[128] = {};

    constexpr explicit ByteTables(KVFormat format) {
        for (int code = 0; code < 128; ++code) {
            int bits = integer_bits(code);
            if (format == kFp8)  // numbers below the smallest normal one count in 2^-9
                bits = code >= 8 ? (code << 4) + ((127 - 7) << 7) : code ? bits - (9 << 7) : 0;
            low[code] = static_cast<uint8_t>(bits);
            high[code] = static_cast<uint8_t>(bits >> 8);
        }
    }

    static constexpr int integer_bits(int number) {
        if (number == 0) return 0;
        int power = 0;
        while (number >> (power + 1)) ++power;
        return ((127 + power) << 7) | ((number << (7 - power)) & 0x7f);
    }
};

// int8 or float8_e4m3fn.
template <KVFormat kFormat>
struct ByteKV {
    using Number = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr bool kIsTransformed = false;
    static constexpr bool kHasColumns = false;
    static constexpr int kPackedDims = 64;
    static int width(int head_dim) { return head_dim; }

    // As of Bf16KV.
    template <class F>
    static void pack_keys(const uint8_t* keys, const int32_t* slots, int num_keys, int head_dim,
                          uint32_t* packed, F&& between) {
        // In a lane 4 dimensions of 4 keys: the first two of every key, then the others.
        const __m512i by_pair = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        for (int group = 0; group < num_keys; group += 16)
            for (int dim = 0; dim < head_dim; dim += 64) {
                const int width = std::min(64, head_dim - dim);
                Ints rows[16];
                for (int i = 0; i < 16; ++i) {
                    const int64_t slot = slots[std::min(group + i, num_keys - 1)];
                    rows[i] = (Ints)_mm512_maskz_loadu_epi8(bytes_below(width),
                                                            keys + slot * head_dim + dim);
                }
                transpose(rows);
                uint32_t* to = packed + dim / 2 * kKeys + group;
                for (int i = 0; i < width / 4; ++i, to += 2 * kKeys) {
                    const Wide wide(_mm512_shuffle_epi8((__m512i)rows[i], by_pair));
                    _mm512_store_si512(to, wide.first());
                    _mm512_store_si512(to + kKeys, wide.second());
                }
                between();
            }
    }

    // As of Bf16KV.
    static void pack_values(const uint8_t* values, const int32_t* slots, int num_keys,
                            int head_dim, uint32_t* packed) {
        // Dimension 16 g + 4 l + i goes to lane l, byte 4 g + i: from there each unpacking yields 16
        // dimensions that follow each other.
        const __m512i by_lane = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
            _mm512_setr_epi32(0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c, 0x13121110, 0x17161514,
                              0x1b1a1918, 0x1f1e1d1c, 0x23222120, 0x27262524, 0x2b2a2928, 0x2f2e2d2c,
                              0x33323130, 0x37363534, 0x3b3a3938, 0x3f3e3d3c));
        for (int key = 0; key < num_keys; key += 2) {
            const uint8_t* even = values + static_cast<int64_t>(slots[key]) * head_dim;
            const bool has_odd = key + 1 < num_keys;
            const uint8_t* odd =
                has_odd ? values + static_cast<int64_t>(slots[key + 1]) * head_dim : even;
            for (int dim = 0; dim < head_dim; dim += 64) {
                const __mmask64 lanes = bytes_below(head_dim - dim);
                const Wide low(_mm512_permutexvar_epi8(
                    by_lane, _mm512_maskz_loadu_epi8(lanes, even + dim)));
                const Wide high(_mm512_permutexvar_epi8(
                    by_lane, _mm512_maskz_loadu_epi8(has_odd ? lanes : 0, odd + dim)));
                const __m512i both[4] = {_mm512_unpacklo_epi16(low.first(), high.first()),
                                         _mm512_unpackhi_epi16(low.first(), high.first()),
                                         _mm512_unpacklo_epi16(low.second(), high.second()),
                                         _mm512_unpackhi_epi16(low.second(), high.second())};
                uint32_t* to = packed + key / 2 * head_dim + dim;
                for (int part = 0; part < std::min(4, (head_dim - dim) / 16); ++part)
                    _mm512_store_si512(to + part * 16, both[part]);
            }
        }
    }

  private:
    static constexpr ByteTables kTables{kFormat};

    // 64 numbers in bfloat16: of each lane's 16 the first 8, and the second.
    struct Wide {
        __m512i low, high;

        explicit Wide(__m512i codes) {
            const __m512i index = kFormat == kInt8 ? _mm512_abs_epi8(codes) : codes;
            low = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.low), index,
                                           _mm512_load_si512(kTables.low + 64));
            high = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.high), index,
                                            _mm512_load_si512(kTables.high + 64));
            // high | (codes & 0x80)
            high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);
        }
        __m512i first() const { return _mm512_unpacklo_epi8(low, high); }
        __m512i second() const { return _mm512_unpackhi_epi8(low, high); }
    };
};

}  // namespace stemma
