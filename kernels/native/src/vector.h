// Sixteen lanes of float32 or int32 at a time, whatever the CPU's registers hold: one register of
// AVX512, two of AVX2 (with FMA and F16C), four of NEON. The kernels are written once, over these.
// STEMMA_BF16_PRODUCTS: the CPU multiplies pairs of bfloat16 by itself, and bytes.
//
//     Floats, Ints    16 lanes
//     Halfwords       16 numbers of 16 bits
//     Choice          what a comparison yields
//     Mask            a bit a lane
//     kRegisters      how many of 16 lanes the registers hold: the sizes of tiles follow from it
#pragma once

#include <cstdint>

// For functions of 16 lanes: where those take several registers, a call passes them through memory.
#define STEMMA_INLINE inline __attribute__((always_inline))

namespace stemma {

using bf16 = uint16_t;
using Mask = uint16_t;

inline Mask lanes_below(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<Mask>((1u << count) - 1);
}

// Into the second-level cache. An instruction of its own: GCC 12 takes a function that does nothing but
// __builtin_prefetch for one without effects, and drops its calls.
inline void prefetch(const void* at) {
    const auto& byte = *static_cast<const char*>(at);
#if defined(__aarch64__)
    asm volatile("prfm pldl2keep, %0" : : "Q"(byte));
#else
    asm volatile("prefetcht1 %0" : : "m"(byte));
#endif
}

// Into the first-level cache, soon to be read.
inline void prefetch_stream(const void* at) {
    const auto& byte = *static_cast<const char*>(at);
#if defined(__aarch64__)
    asm volatile("prfm pldl1keep, %0" : : "Q"(byte));
#else
    asm volatile("prefetcht0 %0" : : "m"(byte));
#endif
}

}  // namespace stemma

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define STEMMA_AVX512
#endif

#if defined(STEMMA_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && \
    defined(__AVX512VNNI__)
#define STEMMA_BF16_PRODUCTS
#include "vector_avx512.h"
#elif defined(STEMMA_AVX512)
#include "vector_avx512f.h"
#include "vector_parts.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#include "vector_parts.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define STEMMA_BF16_PRODUCTS
#endif
#include "vector_neon.h"
#include "vector_parts.h"
#else
#error "the kernels need AVX512, AVX2 with FMA and F16C, or NEON of 64-bit ARM"
#endif

#if defined(STEMMA_BF16_PRODUCTS)
#include "bf16_pairs.h"
#endif

#if defined(STEMMA_AVX512) && defined(__AVX512VNNI__)
#include "byte_products_vnni.h"
#elif defined(STEMMA_BF16_PRODUCTS)
#include "byte_products_neon.h"
#else
#include "byte_products.h"
#endif
