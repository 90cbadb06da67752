// The transposition of 16 registers of 16 lanes that both ways of AVX512 share.
#pragma once

#include <immintrin.h>

namespace stemma {

// Register: a vector of 64 bytes.
template <typename Register>
inline void transpose_registers(Register (&rows)[16]) {
    __m512i row[16], t[16];
    for (int i = 0; i < 16; ++i) row[i] = (__m512i)rows[i];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        row[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        row[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        row[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        row[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = (Register)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 4] = (Register)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 8] = (Register)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 12] = (Register)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

}  // namespace stemma
