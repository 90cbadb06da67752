// Paged attention over a work list: the same kernel for decode, prefill chunks and shared segments.
//
// An item says that a run of query tokens attends to a run of KV slots, all of them or up to each
// token's own place. A token that several items serve (the shared segments of a tree, parts of a
// long context) gets one partial result an item: the largest score, the sum of the exponentials and
// the weighted values, merged afterwards (Milakov and Gimelshein 2018; FlashAttention, Dao et al.
// 2022; the split form is FlashDecoding's). So KV that many rows share is read and packed once for
// all of them, and the products over it are dense.
//
// A unit of work is an item by a KV head; its rows are the item's tokens by the query heads of that
// KV head. Keys are taken 64 at a time and packed for vdpbf16ps; scores stay in registers until
// they are probabilities, rounded to bfloat16 for the product with the values; sums are float32.
// Values are packed too where many rows take them; few multiply them as they lie, which yields the
// same bits. On a CPU that multiplies floats only, row_lanes.h computes units of many rows.
//
// Keys and values in 8 bits become bfloat16 while they are packed, without loss, as their scales are
// left out: a key's scale multiplies its scores, a value's its probabilities. So quantized KV costs a
// few instructions a number and half of the memory traffic. In 4 bits queries are transformed as keys
// are, and the sums of values back. The halves of a vector have scales of their own, so that a score is
// the sum of two and values have two kinds of probabilities. What is to be added to all numbers of a
// half is added to a score as often as the query's sum, and to sums as often as the probabilities.
#include "attention_blocks.h"
#if !defined(STEMMA_BF16_PRODUCTS)
#include "row_lanes.h"
#endif

namespace stemma {
namespace {

constexpr int kTileRows = 6;
constexpr int kMaxSums = 24;
// Sums beside each other in a row of a tile, of 32 registers 24 in all, of 8 as many as rows.
constexpr int kWidth = kRegisters >= 32 ? kMaxSums / kTileRows : 1;
// Rows for which values are not packed: as many cost as much as packing them.
constexpr int kFewRows = 2 * kTileRows;
// Steps of products that take as long as packing 16 keys' dimensions at once (by counting
// instructions).
constexpr int kPackingSteps = 3;

// The scales of both halves of some slots' vectors, and what is added to their numbers, [2][kKeys].
void pack_ranges(const float* ranges, const int32_t* slots, int num_keys, float* const (&scales)[2],
                 float* const (&added)[2]) {
    for (int group = 0; group < num_keys; group += 16) {
        const Ints words = as_ints(gather(ranges, slots + group, lanes_below(num_keys - group)));
        Floats of_half[2], zero[2];
        NibbleKV::unpack_range(words, of_half, zero);
        for (int half = 0; half < 2; ++half) {
            store(scales[half] + group, of_half[half]);
            store(added[half] + group, zero[half]);
        }
    }
}

// What `store_pairs` keeps of numbers.
STEMMA_INLINE Floats kept(Floats x) {
    if constexpr (kPairsAreBf16) return widen(narrow(x));
    return x;
}

// What a unit's rows have so far: row r is token r / group, query head r % group of its KV head.
struct Rows {
    int count;
    const Pair* q;   // [count, head_dim / 2]
    float* sums;     // [count, head_dim] weighted values
    Pair* probs;     // [count, kKeys / 2]
    float* largest;  // [count] score before the softmax's scaling
    float* totals;   // [count, 16] sums of exponentials, a lane for every 16th key
    float* decay;    // [count] by which a block shrinks what was summed before
    int* first_seen; // [count] each row sees keys [first_seen, end_seen) of the block, at least one
    int* end_seen;
    // Of KV in 4 bits, by half of a vector:
    Pair* second_probs;  // as probs, which are the first half's
    float* q_sums;       // [2, count] sums of q
    float* added;        // [2, count, 16] what is to be added to all sums, in parts
    int stride;          // from the first half to the second, in rows

    Rows from(int skip, int head_dim) const {
        return {count - skip,          q + skip * (head_dim / 2), sums + skip * head_dim,
                probs + skip * (kKeys / 2), largest + skip,    totals + skip * 16,
                decay + skip,          first_seen + skip,      end_seen + skip,
                second_probs + skip * (kKeys / 2), q_sums + skip, added + skip * 16, stride};
    }
};

// A block of keys with their values, as the products want them.
struct Block {
    uint32_t* keys;       // [head_dim / 2, kKeys] pairs of dimensions
    uint32_t* values;     // [kKeys / 2, head_dim] pairs of keys
    Upcoming* upcoming;   // what is asked for meanwhile
    int num_parts;            // of a vector, with scales of their own: one, or two halves
    float* key_scales[2];     // [kKeys] a part, null where the format has none
    float* value_scales[2];
    float* key_added[2];      // to numbers before they are scaled, [kKeys] of two parts
    float* value_added[2];
    int num_keys;
};

// All loops over a tile are unrolled: only so do its sums stay in registers.
#define STEMMA_UNROLL _Pragma("GCC unroll 8")
#define STEMMA_EACH(i, count) STEMMA_UNROLL for (int i = 0; i < (count); ++i)

// Packed columns: [pairs, stride].
struct Packed {
    const uint32_t* pairs;
    int stride;

    static constexpr bool has_second(int) { return true; }
    template <int kStep>
    STEMMA_INLINE auto column(int pair, int group) const {
        return column_of<kStep>(load_ints(pairs + pair * stride + group * 16));
    }
};

// Values as they lie, whose pairs are of keys.
template <class KV>
struct Lying {
    const typename KV::Number* values;  // of slot 0, from some dimension on
    const int32_t* slots;
    int num_keys, head_dim;

    bool has_second(int pair) const { return 2 * pair + 1 < num_keys; }
    template <int kStep>
    STEMMA_INLINE auto column(int pair, int group) const {
        return KV::template column<kStep>(
            at(2 * pair, group), has_second(pair) ? at(2 * pair + 1, group) : nullptr);
    }

  private:
    STEMMA_INLINE const typename KV::Number* at(int key, int group) const {
        return values + static_cast<int64_t>(slots[key]) * head_dim + group * 16;
    }
};

template <int kStep, class Columns, int kRows, int kGroups>
STEMMA_INLINE void add_step(const Pair* rows, int row_stride, const Columns& columns, int pair,
                            Floats (&sums)[kRows][kGroups]) {
    decltype(columns.template column<kStep>(0, 0)) column[kGroups];
    STEMMA_EACH(g, kGroups) column[g] = columns.template column<kStep>(pair, g);
    STEMMA_EACH(r, kRows) STEMMA_EACH(g, kGroups)
        sums[r][g] = add_products<kStep>(sums[r][g], column[g], rows[r * row_stride + pair]);
}

// sums[r][g] += rows[r, pair] * columns[pair, 16 g ...] over pairs of bfloat16.
template <class Columns, int kRows, int kGroups>
STEMMA_INLINE void multiply(const Pair* rows, int row_stride, const Columns& columns, int num_pairs,
                            Upcoming& upcoming, Floats (&sums)[kRows][kGroups]) {
    for (int pair = 0; pair < num_pairs; ++pair) {
        add_step<0>(rows, row_stride, columns, pair, sums);
        if constexpr (kPairSteps == 2)
            if (columns.has_second(pair)) add_step<1>(rows, row_stride, columns, pair, sums);
        upcoming.ask();
    }
}

// s = rows x keys, over some pairs of dimensions.
template <int kRows, int kGroups>
inline void add_scores(const Pair* q, int q_stride, const uint32_t* keys, int num_pairs,
                       Upcoming& upcoming, Floats (&s)[kRows][kGroups]) {
    STEMMA_UNROLL
    for (int from = 0; from < kGroups; from += kWidth) {
        constexpr int kBeside = std::min(kGroups, kWidth);
        Floats sums[kRows][kBeside];
        STEMMA_EACH(r, kRows) STEMMA_EACH(g, kBeside) sums[r][g] = zero_floats();
        const Packed columns{keys + from * 16, kKeys};
        multiply(q, q_stride, columns, num_pairs, upcoming, sums);
        STEMMA_EACH(r, kRows) STEMMA_EACH(g, kBeside) s[r][from + g] = sums[r][g];
    }
}

// Scores of kRows rows by kGroups * 16 keys, made probabilities of this block.
template <int kRows, int kGroups>
void score_tile(const Rows& rows, int first, const Block& block, int num_pairs,
                const Scoring& scoring) {
    Floats s[kRows][kGroups];
    const Pair* q = rows.q + first * num_pairs;
    if (block.num_parts == 1) {
        add_scores(q, num_pairs, block.keys, num_pairs, *block.upcoming, s);
        if (block.key_scales[0] != nullptr) {
            STEMMA_EACH(g, kGroups) {
                const Floats scales = load(block.key_scales[0] + g * 16);
                STEMMA_EACH(r, kRows) s[r][g] = s[r][g] * scales;
            }
        }
    } else {
        const int half = num_pairs / 2;
        Floats second[kRows][kGroups];
        add_scores(q, num_pairs, block.keys, half, *block.upcoming, s);
        add_scores(q + half, num_pairs, block.keys + half * kKeys, half, *block.upcoming, second);
        const float* q_sums[] = {rows.q_sums + first, rows.q_sums + rows.stride + first};
        STEMMA_EACH(g, kGroups) {
            const Floats scale[] = {load(block.key_scales[0] + g * 16),
                                    load(block.key_scales[1] + g * 16)};
            const Floats added[] = {load(block.key_added[0] + g * 16),
                                    load(block.key_added[1] + g * 16)};
            STEMMA_EACH(r, kRows) {
                s[r][g] = scale[0] * fmadd(splat(q_sums[0][r]), added[0], s[r][g]);
                second[r][g] = fmadd(splat(q_sums[1][r]), added[1], second[r][g]);
                s[r][g] = fmadd(scale[1], second[r][g], s[r][g]);
            }
        }
    }
    if (scoring.soft_cap > 0) {
        const Floats factor = splat(scoring.cap_factor);
        const Floats cap = splat(scoring.soft_cap);
        STEMMA_EACH(r, kRows) {
            STEMMA_EACH(g, kGroups)
                s[r][g] = cap * tanh(s[r][g] * factor);
        }
    }
    // In stages over all rows, so that one row's long chain (a maximum over lanes) runs beside the
    // others' instead of after them.
    const Floats lowest = splat(-INFINITY), factors = splat(scoring.factor);
    Floats top[kRows];
    STEMMA_EACH(r, kRows) {
        const int from = rows.first_seen[first + r], to = rows.end_seen[first + r];
        if (from > 0 || to < kGroups * 16) {
            STEMMA_EACH(g, kGroups) {
                const int before = std::clamp(from - g * 16, 0, 16);
                const int seen = std::clamp(to - g * 16, 0, 16);
                const auto lanes = static_cast<Mask>((1u << seen) - (1u << before));
                s[r][g] = select(choice(lanes), s[r][g], lowest);
            }
        }
        top[r] = s[r][0];
        STEMMA_UNROLL
        for (int g = 1; g < kGroups; ++g) top[r] = max(top[r], s[r][g]);
    }
    constexpr Mask kLanes = (1u << kRows) - 1;  // a lane for each row
    const Floats before = load(rows.largest + first, kLanes);
    alignas(64) float lanes[16];
    STEMMA_EACH(r, kRows) lanes[r] = largest_of(top[r]);
    const Floats largest = max(before, load(lanes, kLanes));
    const Floats decay = exp2_nonpositive((before - largest) * factors);
    store(rows.largest + first, largest, kLanes);
    store(rows.decay + first, decay, kLanes);
    STEMMA_EACH(r, kRows) {
        const Floats shift = splat_lane(largest, r) * factors;
        Floats sum = zero_floats(), added[2] = {zero_floats(), zero_floats()};
        Pair* out = rows.probs + (first + r) * (kKeys / 2);
        Pair* second = rows.second_probs + (first + r) * (kKeys / 2);
        STEMMA_EACH(g, kGroups) {
            const Floats p = exp2_nonpositive(fmsub(s[r][g], factors, shift));
            sum = sum + p;
            const Floats weight =
                block.value_scales[0] != nullptr ? p * load(block.value_scales[0] + g * 16) : p;
            store_pairs(out + g * 8, weight);
            if (block.num_parts == 2) {
                const Floats other = p * load(block.value_scales[1] + g * 16);
                store_pairs(second + g * 8, other);
                added[0] = fmadd(kept(weight), load(block.value_added[0] + g * 16), added[0]);
                added[1] = fmadd(kept(other), load(block.value_added[1] + g * 16), added[1]);
            }
        }
        for (int part = 0; part < 2 && block.num_parts == 2; ++part) {
            float* so_far = rows.added + (part * rows.stride + first + r) * 16;
            store(so_far, fmadd(load(so_far), splat_lane(decay, r), added[part]));
        }
        float* total = rows.totals + (first + r) * 16;
        store(total, fmadd(load(total), splat_lane(decay, r), sum));
    }
}

// sums = sums * decay + probabilities x values, for kRows rows by kGroups * 16 dimensions.
template <class Columns, int kRows, int kGroups>
void value_tile(const Rows& rows, const Pair* probs, int first, const Columns& values,
                const Block& block, int head_dim, int dim) {
    Floats o[kRows][kGroups];
    STEMMA_EACH(r, kRows) {
        const Floats decay = splat(rows.decay[first + r]);
        STEMMA_EACH(g, kGroups)
            o[r][g] = decay * load(rows.sums + (first + r) * head_dim + dim + g * 16);
    }
    multiply(probs + first * (kKeys / 2), kKeys / 2, values, (block.num_keys + 1) / 2,
             *block.upcoming, o);
    STEMMA_EACH(r, kRows) STEMMA_EACH(g, kGroups)
        store(rows.sums + (first + r) * head_dim + dim + g * 16, o[r][g]);
}

using ScoreTile = void (*)(const Rows&, int, const Block&, int, const Scoring&);
template <class Columns>
using ValueTile = void (*)(const Rows&, const Pair*, int, const Columns&, const Block&, int, int);
#define STEMMA_SCORES(rows) \
    {score_tile<rows, 1>, score_tile<rows, 2>, score_tile<rows, 3>, score_tile<rows, 4>}
#define STEMMA_VALUES(rows)                                                                   \
    {value_tile<Columns, rows, 1>, value_tile<Columns, rows, std::min(2, kWidth)>,            \
     value_tile<Columns, rows, std::min(3, kWidth)>, value_tile<Columns, rows, std::min(4, kWidth)>}
#define STEMMA_TILES(row) {row(1), row(2), row(3), row(4), row(5), row(6)}
constexpr ScoreTile kScoreTile[kTileRows][4] = STEMMA_TILES(STEMMA_SCORES);
template <class Columns>
constexpr ValueTile<Columns> kValueTile[kTileRows][4] = STEMMA_TILES(STEMMA_VALUES);

// How often attend_block, and the packing of keys before it, ask for what is upcoming.
int num_steps(int num_rows, int num_keys, int head_dim, int packed_dims) {
    const auto up = [](int count, int size) { return (count + size - 1) / size; };
    const int groups = up(num_keys, 16);
    const int score_steps = head_dim / 2 * up(groups, kWidth);
    const int value_steps = up(num_keys, 2) * up(head_dim / 16, kWidth);
    return up(num_rows, kTileRows) * (score_steps + value_steps) +
           kPackingSteps * groups * up(head_dim, packed_dims);
}

// One block of keys for all rows. columns(dim): its values from a dimension on.
template <class F>
void attend_block(const Rows& rows, const Block& block, int head_dim, const Scoring& scoring,
                  F&& columns) {
    const int groups = (block.num_keys + 15) / 16;
    const int num_tiles = (rows.count + kTileRows - 1) / kTileRows;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int first = rows.count * tile / num_tiles;
        const int count = rows.count * (tile + 1) / num_tiles - first;
        kScoreTile[count - 1][groups - 1](rows, first, block, head_dim / 2, scoring);
        const int part_dims = head_dim / block.num_parts;
        for (int dim = 0; dim < head_dim;) {
            const int left = (dim < part_dims ? part_dims : head_dim) - dim;
            const int width = std::min(kWidth, left / 16);
            const Pair* probs = dim < part_dims ? rows.probs : rows.second_probs;
            kValueTile<decltype(columns(0))>[count - 1][width - 1](rows, probs, first,
                                                                  columns(dim), block, head_dim,
                                                                  dim);
            dim += 16 * width;
        }
    }
}

// Transformed queries of `count` heads, as packed keys want them, and the sums of their halves.
void transform_queries(const bf16* from, int count, int dims, Pair* q, float* q_sums, int stride) {
    thread_local std::vector<float> wide, ordered;
    wide.resize(dims);
    ordered.resize(dims);
    for (int row = 0; row < count; ++row, from += dims, q += dims / 2) {
        for (int dim = 0; dim < dims; dim += 16) store(wide.data() + dim, load_bf16(from + dim));
        hadamard(wide.data(), dims);
        NibbleKV::in_order(wide.data(), dims, ordered.data());
        Floats sums[] = {zero_floats(), zero_floats()};
        for (int dim = 0; dim < dims; dim += 16) {
            const Floats numbers = load(ordered.data() + dim);
            store_pairs(q + dim / 2, numbers);
            Floats& sum = sums[dim >= dims / 2];
            sum = sum + kept(numbers);
        }
        q_sums[row] = sum_of(sums[0]);
        q_sums[stride + row] = sum_of(sums[1]);
    }
}

template <class KV>
void run_unit(const Attention& a, Unit unit, Unit next) {
#if !defined(STEMMA_BF16_PRODUCTS)
    if constexpr (KV::kHasColumns)
        if (suit_row_lanes(unit.item->num_tokens * (a.num_heads / a.num_kv_heads)))
            return run_unit_by_row_lanes<KV>(a, unit, next);
#endif
    thread_local Workspace workspace;
    const Item& item = *unit.item;
    const int kv_head = unit.kv_head;
    const int group = a.num_heads / a.num_kv_heads, dims = a.head_dim;
    const int count = item.num_tokens * group;
    const bool are_few = KV::kHasColumns && count <= kFewRows;
    const size_t row_bytes =
        (dims + 2 * kKeys) / 2 * sizeof(Pair) + dims * 4 + 54 * sizeof(float);
    workspace.begin(2 * kKeys * (dims * 2 + 4 * sizeof(float)) + count * row_bytes +
                    24 * Workspace::kAlignment);
    Block block;
    block.keys = workspace.take<uint32_t>(kKeys * dims / 2);
    block.values = workspace.take<uint32_t>(kKeys * dims / 2);
    Upcoming upcoming;
    block.upcoming = &upcoming;
    block.num_parts = KV::kIsTransformed ? 2 : 1;
    block.key_scales[0] = block.value_scales[0] = nullptr;
    for (int part = 0; KV::kIsScaled && part < block.num_parts; ++part) {
        block.key_scales[part] = workspace.take<float>(kKeys);
        block.value_scales[part] = workspace.take<float>(kKeys);
    }
    for (int part = 0; KV::kIsTransformed && part < 2; ++part) {
        block.key_added[part] = workspace.take<float>(kKeys);
        block.value_added[part] = workspace.take<float>(kKeys);
    }
    Rows rows;
    rows.count = count;
    rows.sums = workspace.take<float>(count * dims);
    rows.probs = workspace.take<Pair>(count * kKeys / 2);
    auto* q = workspace.take<Pair>(count * dims / 2);
    rows.q = q;
    rows.largest = workspace.take<float>(count);
    rows.totals = workspace.take<float>(count * 16);
    rows.decay = workspace.take<float>(count);
    rows.first_seen = workspace.take<int>(count);
    rows.end_seen = workspace.take<int>(count);
    rows.second_probs = nullptr;
    rows.q_sums = rows.added = nullptr;
    rows.stride = count;
    if constexpr (KV::kIsTransformed) {
        rows.second_probs = workspace.take<Pair>(count * kKeys / 2);
        rows.q_sums = workspace.take<float>(2 * count);
        rows.added = workspace.take<float>(2 * count * 16);
        std::memset(rows.added, 0, sizeof(float) * 2 * count * 16);
    }
    for (int token = 0; token < item.num_tokens; ++token) {
        const bf16* from = static_cast<const bf16*>(a.q) + (item.token + token) * a.q_stride +
                           kv_head * group * dims;
        Pair* to = q + token * group * (dims / 2);
        if constexpr (KV::kIsTransformed)
            transform_queries(from, group, dims, to, rows.q_sums + token * group, count);
        else
            copy_pairs(from, group * dims, to);
    }
    std::memset(rows.sums, 0, sizeof(float) * count * dims);
    std::fill(rows.largest, rows.largest + count, -INFINITY);
    std::memset(rows.totals, 0, sizeof(float) * count * 16);

    const HeadKV<KV> kv(a, kv_head);
    const Scoring scoring(a);
    const int32_t* slots = a.slots + item.first_slot;
    const int last_seen = item.num_seen();
    for (int first = 0; first < last_seen; first += kKeys) {
        block.num_keys = std::min(kKeys, last_seen - first);
        const auto [begin, end] = SeeingTokens(item, first, block.num_keys);
        for (int row = begin * group; row < end * group; ++row) {
            rows.first_seen[row] = std::max(0, item.num_hidden + row / group - first);
            rows.end_seen[row] = std::min(block.num_keys, item.num_visible + row / group - first);
        }
        const int32_t* at = slots + first;
        set_upcoming<KV>(a, unit, next, first, block.num_keys, upcoming);
        upcoming.begin(
            num_steps((end - begin) * group, block.num_keys, dims, KV::kPackedDims));
        KV::pack_keys(kv.keys, at, block.num_keys, dims, block.keys,
                      [&] { upcoming.ask(kPackingSteps); });
        if (!are_few) KV::pack_values(kv.values, at, block.num_keys, dims, block.values);
        if constexpr (KV::kIsTransformed) {
            const int num = block.num_keys;
            pack_ranges(kv.key_scales, at, num, block.key_scales, block.key_added);
            pack_ranges(kv.value_scales, at, num, block.value_scales, block.value_added);
        } else if constexpr (KV::kIsScaled) {
            pack_scales(kv.key_scales, at, block.num_keys, block.key_scales[0]);
            pack_scales(kv.value_scales, at, block.num_keys, block.value_scales[0]);
        }
        Rows seeing = rows.from(begin * group, dims);
        seeing.count = (end - begin) * group;
        const auto packed = [&](int dim) { return Packed{block.values + dim, dims}; };
        if constexpr (KV::kHasColumns) {
            const auto lying = [&](int dim) {
                return Lying<KV>{kv.values + dim, at, block.num_keys, dims};
            };
            if (are_few)
                attend_block(seeing, block, dims, scoring, lying);
            else
                attend_block(seeing, block, dims, scoring, packed);
        } else {
            attend_block(seeing, block, dims, scoring, packed);
        }
    }
    for (int row = 0; row < count; ++row) {
        if constexpr (KV::kIsTransformed) {
            float* sums = rows.sums + row * dims;
            for (int dim = 0; dim < dims; dim += 16) {
                const int part = dim >= dims / 2;
                const float added = sum_of(load(rows.added + (part * count + row) * 16));
                store(sums + dim, load(sums + dim) + splat(added));
            }
            hadamard(sums, dims);
        }
        const float total = sum_of(load(rows.totals + row * 16));
        finish_row<bf16>(a, item, kv_head, row, rows.sums + row * dims, rows.largest[row], total);
    }
}

}  // namespace
}  // namespace stemma

using namespace stemma;

extern "C" void stemma_attention(const void* plan, const void* q, int64_t q_stride, const void* kv,
                                 const float* scales, const float* sinks, void* out) {
    const Attention a{*static_cast<const Plan*>(plan), q, q_stride, kv, scales, sinks, out};
    constexpr decltype(&run_unit<Bf16KV>) kRunUnit[] = {
        run_unit<Bf16KV>, run_unit<ByteKV<kInt8>>, run_unit<ByteKV<kFp8>>,
        run_unit<NibbleKV>};
    const auto run = kRunUnit[a.format];
    run_plan<bf16>(a, [&](Unit unit, Unit next) { run(a, unit, next); });
}
