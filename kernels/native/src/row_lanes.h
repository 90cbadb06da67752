// A unit of many rows on a CPU that multiplies floats only: a row a lane.
//
// In attention.cpp a register holds keys side by side, which takes transposing them, and a row's largest
// score is found across lanes. Here it holds rows: keys and values are made floats as they lie, and each
// step of the softmax is one of 16 rows. A row goes through the same operations in the same order, so
// that of finite numbers its bits are the same, but for the sign of a zero.
#pragma once

#include <type_traits>

#include "attention_blocks.h"

namespace stemma {

// Vectors of rows in a tile, and keys, or dimensions of values, by which they are multiplied: of 32
// registers 24 hold sums.
constexpr int kMostVectors = kRegisters >= 32 ? 4 : 1;
constexpr int numbers_beside(int num_vectors) {
    return kRegisters < 32 || num_vectors == 4 ? 6 : 8;
}

// Whether these rows take less time as lanes (measured): they must fill their vectors, and with registers
// of 16 lanes there must be three vectors, else a tile loads more than it multiplies.
inline bool suit_row_lanes(int num_rows) {
    const int num_vectors = (num_rows + 15) / 16;
    return kRegisters >= 32 ? num_vectors >= 3 && num_rows * 20 >= num_vectors * 16 * 17
                            : num_rows * 4 >= num_vectors * 16 * 3;
}

// Calls run(first, size) for nearly equal parts of [0, count), of `most` at most.
template <class F>
STEMMA_INLINE void for_each_part(int count, int most, F&& run) {
    const int num_parts = (count + most - 1) / most;
    for (int part = 0; part < num_parts; ++part) {
        const int first = count * part / num_parts;
        run(first, count * (part + 1) / num_parts - first);
    }
}

// Vectors of rows that a tile may hold together. What belongs to a strip lies together: with all rows of
// an item side by side, numbers of a row would be a power of two apart, or a page.
struct Strip {
    int64_t stride;  // of lanes: 16 times the number of vectors
    float* q;        // [head_dim, stride]
    float* sums;     // [head_dim, stride] weighted values
    float* probs;    // [kKeys, stride] a block's scores, then their probabilities
    float* largest;  // [stride] score before the softmax's scaling
    float* top;      // [stride] the same of a block
    float* decay;    // [stride] by which a block shrinks what was summed before
    float* totals;   // [16, stride] sums of exponentials, one for every 16th key
    int* tokens;     // [stride] of the item
};

// Row r is lane r % 16 of vector r / 16; of the last vector's lanes without a row nothing is read.
class RowLanes {
  public:
    static size_t bytes(int num_vectors, int dims) {
        return num_vectors * 16 * sizeof(float) * (2 * dims + kKeys + 20) +
               8 * Workspace::kAlignment;
    }
    RowLanes(int num_vectors, int dims, Workspace& workspace) : num_vectors_(num_vectors), dims_(dims) {
        const size_t lanes = num_vectors * 16;
        all_.q = workspace.take<float>(lanes * dims);
        all_.sums = workspace.take<float>(lanes * dims);
        all_.probs = workspace.take<float>(lanes * kKeys);
        all_.largest = workspace.take<float>(lanes);
        all_.top = workspace.take<float>(lanes);
        all_.decay = workspace.take<float>(lanes);
        all_.totals = workspace.take<float>(lanes * 16);
        all_.tokens = workspace.take<int>(lanes);
        std::fill_n(all_.sums, lanes * dims, 0.0f);
        std::fill_n(all_.largest, lanes, -INFINITY);
        std::fill_n(all_.totals, lanes * 16, 0.0f);
    }

    // Calls run(strip, first) for all strips; first: the strip's first vector.
    template <class F>
    void for_each_strip(F&& run) const {
        for_each_part(num_vectors_, kMostVectors, [&](int first, int count) {
            const int64_t lane = first * 16;
            run(Strip{count * 16, all_.q + lane * dims_, all_.sums + lane * dims_,
                      all_.probs + lane * kKeys, all_.largest + lane, all_.top + lane,
                      all_.decay + lane, all_.totals + lane * 16, all_.tokens + lane},
                first);
        });
    }

  private:
    int num_vectors_, dims_;
    Strip all_;
};

struct WideBlock {
    float* keys;                  // [kKeys, head_dim]
    float* values;                // [kKeys, head_dim]
    float* key_scales = nullptr;  // [kKeys], null where the format has none
    float* value_scales = nullptr;
    int num_keys;
    int first_seen, end_seen;  // token t sees keys [first_seen + t, end_seen + t)
    bool is_all_seen;          // by all rows
};

// Calls run with `value` as a constant; value: from 1 to kMost.
template <int kMost, class F>
STEMMA_INLINE void with_constant(int value, F&& run) {
    if constexpr (kMost > 1) {
        if (value < kMost) return with_constant<kMost - 1>(value, run);
    }
    run(std::integral_constant<int, kMost>{});
}

#define STEMMA_EACH_NUMBER _Pragma("GCC unroll 8") for (int n = 0; n < kNumbers; ++n)
#define STEMMA_EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < kVectors; ++v)

// sums[n][v] += numbers[n * number_stride + i * step] * vectors[i * stride + 16 v ...] for i < count,
// one after the other.
template <int kNumbers, int kVectors>
STEMMA_INLINE void add_outer_products(const float* numbers, int64_t number_stride, int64_t step,
                                      const float* vectors, int64_t stride, int count,
                                      Floats (&sums)[kNumbers][kVectors]) {
    for (int i = 0; i < count; ++i, numbers += step, vectors += stride) {
        Floats vector[kVectors];
        STEMMA_EACH_VECTOR vector[v] = load(vectors + v * 16);
        STEMMA_EACH_NUMBER STEMMA_EACH_VECTOR
            sums[n][v] = add_product(sums[n][v], vector[v], numbers[n * number_stride]);
    }
}

// Scores of kVectors vectors of rows from `lane` on by kNumbers keys from `key` on.
template <int kNumbers, int kVectors>
__attribute__((noinline)) void score_lanes(const Strip& rows, int lane, const WideBlock& block,
                                           int key, int dims, const Scoring& scoring) {
    Floats s[kNumbers][kVectors];
    STEMMA_EACH_NUMBER STEMMA_EACH_VECTOR s[n][v] = zero_floats();
    add_outer_products(block.keys + key * dims, dims, 1, rows.q + lane, rows.stride, dims, s);
    if (block.key_scales != nullptr) {
        STEMMA_EACH_NUMBER {
            const Floats scale = splat(block.key_scales[key + n]);
            STEMMA_EACH_VECTOR s[n][v] = s[n][v] * scale;
        }
    }
    if (scoring.soft_cap > 0) {
        const Floats factor = splat(scoring.cap_factor), cap = splat(scoring.soft_cap);
        STEMMA_EACH_NUMBER STEMMA_EACH_VECTOR s[n][v] = cap * tanh(s[n][v] * factor);
    }
    if (!block.is_all_seen) {
        const Floats lowest = splat(-INFINITY);
        STEMMA_EACH_VECTOR {
            const Ints token = load_ints(rows.tokens + lane + v * 16);
            STEMMA_EACH_NUMBER {
                const Choice is_before = less(token, splat(key + n - block.end_seen + 1));
                const Choice is_behind = less(splat(key + n - block.first_seen), token);
                s[n][v] = select(is_before, lowest, select(is_behind, lowest, s[n][v]));
            }
        }
    }
    float* to = rows.probs + key * rows.stride + lane;
    STEMMA_EACH_VECTOR {
        Floats top = load(rows.top + lane + v * 16);
        STEMMA_EACH_NUMBER {
            top = max(top, s[n][v]);
            store(to + n * rows.stride + v * 16, s[n][v]);
        }
        store(rows.top + lane + v * 16, top);
    }
}

// A vector's scores become probabilities of this block. A row that has seen no key yet keeps sums of
// zero: its exponents are no numbers, of which exp2_nonpositive makes zero.
__attribute__((noinline)) inline void softmax_of_lanes(const Strip& rows, int lane,
                                                   const WideBlock& block, float scale) {
    const int64_t stride = rows.stride;
    const int num_keys = block.num_keys;
    const float* value_scales = block.value_scales;
    float* probs = rows.probs + lane;
    float* totals = rows.totals + lane;
    const Floats factor = splat(scale), before = load(rows.largest + lane);
    const Floats largest = max(before, load(rows.top + lane)), shift = largest * factor;
    const Floats decay = exp2_nonpositive((before - largest) * factor);
    store(rows.largest + lane, largest);
    store(rows.decay + lane, decay);
    for (int first = 0; first < 16; ++first, probs += stride, totals += stride) {
        Floats sum = zero_floats();
        float* at = probs;
        for (int key = first; key < num_keys; key += 16, at += 16 * stride) {
            const Floats p = exp2_nonpositive(fmsub(load(at), factor, shift));
            sum = sum + p;
            store(at, value_scales == nullptr ? p : p * splat(value_scales[key]));
        }
        store(totals, fmadd(load(totals), decay, sum));
    }
}

// sums = sums * decay + probabilities x values, for kNumbers dimensions from `dim` on.
template <int kNumbers, int kVectors>
__attribute__((noinline)) void add_values_of_lanes(const Strip& rows, int lane,
                                                   const WideBlock& block, int dim, int dims) {
    float* to = rows.sums + dim * rows.stride + lane;
    Floats o[kNumbers][kVectors];
    STEMMA_EACH_VECTOR {
        const Floats decay = load(rows.decay + lane + v * 16);
        STEMMA_EACH_NUMBER o[n][v] = decay * load(to + n * rows.stride + v * 16);
    }
    add_outer_products(block.values + dim, 1, dims, rows.probs + lane, rows.stride, block.num_keys,
                       o);
    STEMMA_EACH_NUMBER STEMMA_EACH_VECTOR store(to + n * rows.stride + v * 16, o[n][v]);
}

// How often attend_strip calls between() for so many vectors.
inline int num_tiles_of_strip(int num_vectors, int num_keys, int dims) {
    const int most = numbers_beside(num_vectors);
    return (num_keys + most - 1) / most + (dims + most - 1) / most;
}

// One block for some vectors of a strip, from `lane` on. between(): once a tile of products.
template <class F>
void attend_strip(const Strip& strip, int lane, int num_vectors, const WideBlock& block, int dims,
                  const Scoring& scoring, F&& between) {
    std::fill_n(strip.top + lane, num_vectors * 16, -INFINITY);
    with_constant<kMostVectors>(num_vectors, [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value, kMost = numbers_beside(kVectors);
        for_each_part(block.num_keys, kMost, [&](int key, int count) {
            with_constant<kMost>(count, [&](auto keys) {
                score_lanes<decltype(keys)::value, kVectors>(strip, lane, block, key, dims, scoring);
            });
            between();
        });
        for (int v = 0; v < kVectors; ++v)
            softmax_of_lanes(strip, lane + v * 16, block, scoring.factor);
        for_each_part(dims, kMost, [&](int dim, int count) {
            with_constant<kMost>(count, [&](auto numbers) {
                add_values_of_lanes<decltype(numbers)::value, kVectors>(strip, lane, block, dim,
                                                                        dims);
            });
            between();
        });
    });
}

// Vectors of some slots -> [num_slots, dims].
template <class KV>
__attribute__((noinline)) void widen(const typename KV::Number* vectors, const int32_t* slots,
                                     int num_slots, int dims, float* to) {
    for (int i = 0; i < num_slots; ++i, to += dims) {
        const auto* from = vectors + static_cast<int64_t>(slots[i]) * dims;
        for (int dim = 0; dim < dims; dim += 16)
            store(to + dim, KV::template column<0>(from + dim, nullptr));
    }
}

// from: [rows, dims] of 16 rows, where at(row) begins -> [dims, stride].
template <class F>
void transpose_queries(F&& at, int dims, int64_t stride, float* to) {
    for (int dim = 0; dim < dims; dim += 16, to += 16 * stride) {
        Ints numbers[16];
        for (int i = 0; i < 16; ++i) numbers[i] = as_ints(load_bf16(at(i) + dim));
        transpose(numbers);
        for (int i = 0; i < 16; ++i) store_ints(to + i * stride, numbers[i]);
    }
}

// from: [count, stride], count a multiple of 16 -> [16, count].
inline void transpose_lanes(const float* from, int64_t stride, int count, float* to) {
    for (int first = 0; first < count; first += 16, from += 16 * stride) {
        Ints numbers[16];
        for (int i = 0; i < 16; ++i) numbers[i] = load_ints(from + i * stride);
        transpose(numbers);
        for (int i = 0; i < 16; ++i) store_ints(to + i * count + first, numbers[i]);
    }
}

template <class KV>
void run_unit_by_row_lanes(const Attention& a, Unit unit, Unit next) {
    thread_local Workspace workspace;
    const Item& item = *unit.item;
    const int group = a.num_heads / a.num_kv_heads, dims = a.head_dim;
    const int count = item.num_tokens * group, num_vectors = (count + 15) / 16;
    workspace.begin(RowLanes::bytes(num_vectors, dims) +
                    sizeof(float) * (2 * kKeys * (dims + 1) + 16 * (dims + 16)) +
                    6 * Workspace::kAlignment);
    const RowLanes rows(num_vectors, dims, workspace);
    WideBlock block;
    block.keys = workspace.take<float>(kKeys * dims);
    block.values = a.values_at == 0 ? block.keys : workspace.take<float>(kKeys * dims);
    if (KV::kIsScaled) {
        block.key_scales = workspace.take<float>(kKeys);
        block.value_scales = workspace.take<float>(kKeys);
    }
    auto* sums_of_rows = workspace.take<float>(16 * dims);
    auto* totals_of_rows = workspace.take<float>(16 * 16);
    const auto* q = static_cast<const bf16*>(a.q) + unit.kv_head * group * dims;
    rows.for_each_strip([&](const Strip& strip, int first) {
        for (int lane = 0; lane < strip.stride; ++lane)
            strip.tokens[lane] = std::min(first * 16 + lane, count - 1) / group;
        for (int lane = 0; lane < strip.stride; lane += 16)
            transpose_queries(
                [&](int i) {
                    const int row = std::min(first * 16 + lane + i, count - 1);
                    return q + (item.token + row / group) * a.q_stride + row % group * dims;
                },
                dims, strip.stride, strip.q + lane);
    });

    const HeadKV<KV> kv(a, unit.kv_head);
    const Scoring scoring(a);
    const int last_seen = item.num_seen();
    Upcoming upcoming;
    for (int first = 0; first < last_seen; first += kKeys) {
        const int32_t* slots = a.slots + item.first_slot + first;
        block.num_keys = std::min(kKeys, last_seen - first);
        const SeeingTokens seeing(item, first, block.num_keys);
        if (seeing.begin == seeing.end) continue;
        block.first_seen = item.num_hidden - first;
        block.end_seen = item.num_visible - first;
        block.is_all_seen =
            block.first_seen + item.num_tokens <= 1 && block.end_seen >= block.num_keys;
        const int begin = seeing.begin * group / 16, end = (seeing.end * group + 15) / 16;
        // Calls run(strip, lane, num_vectors) for the vectors [begin, end).
        const auto for_each_seeing = [&](auto&& run) {
            rows.for_each_strip([&](const Strip& strip, int first_vector) {
                const int from = std::max(begin - first_vector, 0);
                const int to = std::min<int>(end - first_vector, strip.stride / 16);
                if (from < to) run(strip, from * 16, to - from);
            });
        };
        set_upcoming<KV>(a, unit, next, first, block.num_keys, upcoming);
        int num_tiles = 0;
        for_each_seeing([&](const Strip&, int, int vectors) {
            num_tiles += num_tiles_of_strip(vectors, block.num_keys, dims);
        });
        upcoming.begin(num_tiles);
        widen<KV>(kv.keys, slots, block.num_keys, dims, block.keys);
        if (a.values_at != 0) widen<KV>(kv.values, slots, block.num_keys, dims, block.values);
        if constexpr (KV::kIsScaled) {
            pack_scales(kv.key_scales, slots, block.num_keys, block.key_scales);
            pack_scales(kv.value_scales, slots, block.num_keys, block.value_scales);
        }
        for_each_seeing([&](const Strip& strip, int lane, int vectors) {
            attend_strip(strip, lane, vectors, block, dims, scoring, [&] { upcoming.ask(); });
        });
    }
    rows.for_each_strip([&](const Strip& strip, int first) {
        for (int lane = 0; lane < strip.stride; lane += 16) {
            transpose_lanes(strip.sums + lane, strip.stride, dims, sums_of_rows);
            transpose_lanes(strip.totals + lane, strip.stride, 16, totals_of_rows);
            for (int i = 0; i < 16 && first * 16 + lane + i < count; ++i)
                finish_row<bf16>(a, item, unit.kv_head, first * 16 + lane + i,
                                 sums_of_rows + i * dims, strip.largest[lane + i],
                                 sum_of(load(totals_of_rows + i * 16)));
        }
    });
}

#undef STEMMA_EACH_NUMBER
#undef STEMMA_EACH_VECTOR

}  // namespace stemma
