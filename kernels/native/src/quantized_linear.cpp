// Linear layers over weights of 8 or 4 bits, packed once at load.
//
// All products are integers: vpdpbusd multiplies unsigned weights (the number plus 128, plus 8, or
// for the codes of floats, which one shuffle looks up, twice their value plus 12) by signed bytes of the inputs. An input is a byte (W8A8), or 16 bits times a power of two that its
// block of at most 128 inputs shares, as two bytes: 256 * high + low. A bfloat16 has 8 significant
// bits, so that inputs down to 1/128 of their block's largest are exact but for the last bit of the
// very largest. Smaller ones are off by at most 2^-16 of the largest, whose own rounding to bfloat16
// was of up to 2^-9. The sum of a block is exact in int32, in whatever order; only then is it scaled
// and added to a float, block after block: a row's result does not depend on the rows beside it.
//
//     panel   32 columns: per block its scales (32 float16), its offsets (as many) where there are
//             any, then for every 4 inputs the weights as vpdpbusd reads them. 8 bits: 128 bytes,
//             4 of each column. 4 bits: 64 bytes, columns 0..15 in the low halves.
//     row     of rounded inputs: for every 4 inputs their high bytes, then their low bytes (or the
//             only ones); behind all of them a BlockOfInputs a block
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "bf16.h"
#include "linear_output.h"
#include "native.h"
#include "panels.h"

namespace stemma {
namespace {

// Of a tile: 20 sums of 32 registers, see linear.cpp; of 8 four, of one half of a panel after the other.
constexpr int most_rows(int planes) {
    return (kRegisters >= 32 ? 10 : 4) / (planes == 2 ? kProductSums<2> : kProductSums<1>);
}
constexpr int kHalvesAtOnce = kRegisters >= 32 ? 2 : 1;
constexpr int kLargest = 127 * 256 + 127;
constexpr float kSmallestPeak = 1e-30f;  // reference/quantized.py
constexpr int64_t kRowsOfOneThread = 8;  // to be rounded

// What a weight's bits are.
enum Numbers { kBytes, kHalfBytes, kFp4 };
constexpr int bits_of(Numbers numbers) { return numbers == kBytes ? 8 : 4; }

// So few rows pass several panels at once; with more, moving their sums takes longer than it saves.
constexpr int few_rows(Numbers numbers, int planes) {
    if (numbers != kBytes) return 1;
    return 4 / (planes == 2 ? kProductSums<2> : kProductSums<1>);
}

struct BlockOfInputs {
    int32_t start;  // of an integer sum: takes back what makes the weights unsigned
    float scale;    // NaN where an input is not finite
    float sum;      // of the inputs, rounded as they are, scaled
    float unused;
};

struct Job {
    const QuantizedLinear* weight;
    const char* rows;
    void* y;
    int64_t num_rows;
};

int64_t num_blocks(const QuantizedLinear& weight) {
    return (weight.num_inputs + weight.block - 1) / weight.block;
}

BlockOfInputs* blocks_of(const QuantizedLinear& weight, char* row) {
    return reinterpret_cast<BlockOfInputs*>(row + weight.num_planes * weight.num_inputs);
}

BlockOfInputs described(const QuantizedLinear& weight, int32_t sum, float scale) {
    const int32_t shift = weight.bits == 8 ? 128 : weight.is_fp4 ? 12 : 8;
    // The product may wrap around, as the sums do that start with it.
    const auto start = static_cast<int32_t>(0u - static_cast<uint32_t>(shift) * static_cast<uint32_t>(sum));
    return {start, scale, static_cast<float>(sum) * scale, 0.0f};
}

float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float power_of_two(int biased_exponent) {
    return from_bits(static_cast<uint32_t>(biased_exponent) << 23);
}

// The largest of `count` inputs, a multiple of 16, without its sign, as the bits of a bfloat16.
int peak_bits(const bf16* x, int64_t count) {
    Ints peak = zero_ints();
    for (int64_t i = 0; i < count; i += 16)
        peak = max(peak, zero_extend(load_halfwords(x + i)) & splat(0x7fff));
    return largest_of(peak);
}

// 16 bits an input; returns the block's description.
BlockOfInputs round_block(const QuantizedLinear& weight, const bf16* x, int64_t count, char* to) {
    const int exponent = peak_bits(x, count) >> 7;
    // So that the largest is in [2^14, 2^15); what is below 2^-107 may become 0.
    const int shift = std::max(exponent, 20) - 14;
    const Floats inverse = splat(power_of_two(254 - shift));
    Ints sum = zero_ints();
    for (int64_t i = 0; i < count; i += 16) {
        const Floats scaled = load_bf16(x + i) * inverse;
        Ints number = min(round_to_ints(scaled), splat(kLargest));
        number = max(number, splat(-kLargest));
        sum = sum + number;
        store_inputs(to + 2 * i, number);
    }
    const float scale = exponent == 255 ? NAN : power_of_two(shift);
    return described(weight, sum_of(sum), scale);
}

void round_to_16_bits(const QuantizedLinear& weight, const bf16* x, char* row) {
    BlockOfInputs* blocks = blocks_of(weight, row);
    for (int64_t first = 0; first < weight.num_inputs; first += weight.block) {
        const int64_t count = std::min(weight.block, weight.num_inputs - first);
        *blocks++ = round_block(weight, x + first, count, row + 2 * first);
    }
}

// By the rule of reference/quantized.py.
void round_to_8_bits(const QuantizedLinear& weight, const bf16* x, char* row) {
    const int bits = peak_bits(x, weight.num_inputs);
    const bool is_finite = bits >> 7 != 255;
    const float peak = std::max(from_bits(static_cast<uint32_t>(bits) << 16), kSmallestPeak);
    const Floats inverse = splat(is_finite ? 127 / peak : 0.0f);
    const float scale = is_finite ? peak / 127 : NAN;
    BlockOfInputs* blocks = blocks_of(weight, row);
    for (int64_t first = 0; first < weight.num_inputs; first += weight.block) {
        const int64_t last = std::min(first + weight.block, weight.num_inputs);
        Ints sum = zero_ints();
        for (int64_t i = first; i < last; i += 16) {
            const Ints number =
                round_to_ints(load_bf16(x + i) * inverse);
            sum = sum + number;
            store_bytes(row + i, number, 0xffff);
        }
        *blocks++ = described(weight, sum_of(sum), scale);
    }
}

// The inputs of a row in the order of the weight's numbers.
const bf16* in_order(const QuantizedLinear& weight, const bf16* x) {
    thread_local std::vector<bf16> ordered;
    ordered.resize(weight.num_inputs);
    for (int64_t i = 0; i < weight.num_inputs; ++i) ordered[i] = x[weight.input_order[i]];
    return ordered.data();
}

void round_row(const QuantizedLinear& weight, const bf16* x, char* row) {
    if (weight.input_order != nullptr) x = in_order(weight, x);
    if (weight.num_planes == 1) {
        round_to_8_bits(weight, x, row);
    } else {
        round_to_16_bits(weight, x, row);
    }
}

// The weights of 4 inputs and one half of 32 columns, unsigned bytes.
template <Numbers kNumbers>
inline Ints load_weights(const char* from, int half) {
    if constexpr (kNumbers == kBytes) return load_ints(from + 64 * half);
    const Ints both = load_ints(from), low_half = splat(0x0f0f0f0f);
    const Ints codes = half == 0 ? both & low_half : shift_right<4>(both) & low_half;
    if constexpr (kNumbers != kFp4) return codes;
    // E2M1_NUMBERS of quantized_tensors.py, plus 12.
    constexpr int8_t kNumbersOfCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                            12, 11, 10, 9,  8,  6,  4,  0};
    return lookup(kNumbersOfCodes, codes);
}

// A tile's rows, and what is known of a block's inputs of each.
template <int kPlanes>
struct TileRows {
    const char* x;
    int64_t stride;
    const BlockOfInputs* blocks;

    TileRows(const Job& job, int64_t row)
        : x(job.rows + row * job.weight->row_bytes),
          stride(job.weight->row_bytes),
          blocks(reinterpret_cast<const BlockOfInputs*>(x + kPlanes * job.weight->num_inputs)) {}

    const BlockOfInputs& block(int row, int64_t at) const {
        return blocks[row * (stride / static_cast<int64_t>(sizeof(BlockOfInputs))) + at];
    }
};

// Of kRows rows by the columns of a panel: integer sums of a block, and the sums over all blocks.
template <int kPlanes, int kRows>
using BlockSums = Ints[kRows][2][kProductSums<kPlanes>];
template <int kRows>
using Totals = Floats[kRows][2];

// The products of some inputs of a block by some halves of a panel, kRows rows at `x`, `stride` bytes
// apart. What lies `ahead` bytes behind a weight is fetched.
template <Numbers kNumbers, int kPlanes, int kRows>
inline void multiply_halves(const char* x, int64_t stride, const char* weights, int64_t num_steps,
                            int64_t ahead, int first, BlockSums<kPlanes, kRows>& all) {
    constexpr int kStepBytes = 16 * bits_of(kNumbers), kSums = kProductSums<kPlanes>;
    Ints sums[kRows][kHalvesAtOnce][kSums];
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalvesAtOnce; ++h)
#pragma GCC unroll 2
            for (int i = 0; i < kSums; ++i) sums[r][h][i] = all[r][first + h][i];
    for (int64_t step = 0; step < num_steps; ++step) {
        const char* at = weights + step * kStepBytes;
        Weights halves[kHalvesAtOnce];
#pragma GCC unroll 2
        for (int h = 0; h < kHalvesAtOnce; ++h)
            halves[h] = to_weights(load_weights<kNumbers>(at, first + h));
        if (kHalvesAtOnce == 2 || first == 0)
            for (int line = 0; line < kStepBytes; line += 64) prefetch_stream(at + ahead + line);
#pragma GCC unroll 10
        for (int r = 0; r < kRows; ++r) {
            const Inputs<kPlanes> inputs(x + r * stride + step * kPlanes * 4);
#pragma GCC unroll 2
            for (int h = 0; h < kHalvesAtOnce; ++h) inputs.add_products(sums[r][h], halves[h]);
        }
    }
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalvesAtOnce; ++h)
#pragma GCC unroll 2
            for (int i = 0; i < kSums; ++i) all[r][first + h][i] = sums[r][h][i];
}

template <Numbers kNumbers, int kPlanes, int kRows>
inline void multiply(const char* x, int64_t stride, const char* weights, int64_t num_steps,
                     int64_t ahead, BlockSums<kPlanes, kRows>& all) {
    if constexpr (kHalvesAtOnce == 2) {
        multiply_halves<kNumbers, kPlanes, kRows>(x, stride, weights, num_steps, ahead, 0, all);
    } else {
        for (int half = 0; half < 2; ++half)
            multiply_halves<kNumbers, kPlanes, kRows>(x, stride, weights, num_steps, ahead, half, all);
    }
}

template <int kPlanes, int kRows>
inline void start_block(const TileRows<kPlanes>& rows, int64_t block,
                        BlockSums<kPlanes, kRows>& sums) {
    constexpr int kSums = kProductSums<kPlanes>;
    for (int r = 0; r < kRows; ++r) {
        sums[r][0][0] = sums[r][1][0] = zero_ints();
        sums[r][0][kSums - 1] = sums[r][1][kSums - 1] = splat(rows.block(r, block).start);
    }
}

// scales: of the block's columns, with their offsets behind them.
template <int kPlanes, bool kScaled, int kRows>
inline void add_block(const TileRows<kPlanes>& rows, int64_t block, const char* scales,
                      bool has_offsets, const BlockSums<kPlanes, kRows>& sums,
                      Totals<kRows>& totals) {
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r) {
        const BlockOfInputs& inputs = rows.block(r, block);
        const Floats scale = splat(inputs.scale);
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side) {
            const Floats sum = to_floats(joined(sums[r][side]));
            Floats& total = totals[r][side];
            if constexpr (kScaled) {
                total = fmadd(sum * scale, load_float16(scales + 32 * side), total);
                if (has_offsets)
                    total = fmadd(splat(inputs.sum), load_float16(scales + 64 + 32 * side), total);
            } else {
                total = fmadd(sum, scale, total);
            }
        }
    }
}

template <int kRows>
inline void finish(const Job& job, const Totals<kRows>& totals, int64_t row, int64_t panel) {
    const QuantizedLinear& weight = *job.weight;
    const LinearOutput output{weight.bias, job.y, weight.num_outputs, weight.kind};
    const Floats left = load(weight.column_scales + panel * kPanel);
    const Floats right = load(weight.column_scales + panel * kPanel + 16);
    for (int r = 0; r < kRows; ++r)
        finish_row(output, totals[r][0] * left, totals[r][1] * right, row + r, panel);
}

// kRows rows by one panel.
template <Numbers kNumbers, int kPlanes, bool kScaled, int kRows>
void run_tile(const Job& job, int64_t row, int64_t panel) {
    const QuantizedLinear& weight = *job.weight;
    const TileRows<kPlanes> rows(job, row);
    const char* at = static_cast<const char*>(weight.panels) + panel * weight.panel_bytes;
    Totals<kRows> totals;
    for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = zero_floats();
    int64_t block = 0;
    for (int64_t first = 0; first < weight.num_inputs; first += weight.block, ++block) {
        const char* scales = at;
        if constexpr (kScaled) at += weight.has_offsets ? 128 : 64;
        const int64_t num_steps = std::min(weight.block, weight.num_inputs - first) / 4;
        BlockSums<kPlanes, kRows> sums;
        start_block<kPlanes, kRows>(rows, block, sums);
        multiply<kNumbers, kPlanes, kRows>(rows.x + kPlanes * first, rows.stride, at, num_steps,
                                           kAheadBytes, sums);
        at += num_steps * (16 * bits_of(kNumbers));
        add_block<kPlanes, kScaled, kRows>(rows, block, scales, weight.has_offsets, sums, totals);
    }
    finish<kRows>(job, totals, row, panel);
}

// Few rows by `count` panels, kStreams at most: 256 bytes by one panel after the other.
template <Numbers kNumbers, int kPlanes, bool kScaled, int kRows>
void run_streams(const Job& job, int64_t row, int64_t panel, int64_t count) {
    const QuantizedLinear& weight = *job.weight;
    const TileRows<kPlanes> rows(job, row);
    constexpr int64_t kStepBytes = 16 * bits_of(kNumbers), kSteps = 256 / kStepBytes;
    const char* start = static_cast<const char*>(weight.panels) + panel * weight.panel_bytes;
    BlockSums<kPlanes, kRows> sums[kStreams];
    Totals<kRows> totals[kStreams];
    for (int64_t p = 0; p < count; ++p)
        for (int r = 0; r < kRows; ++r) totals[p][r][0] = totals[p][r][1] = zero_floats();
    int64_t block = 0;
    for (int64_t first = 0; first < weight.num_inputs; first += weight.block, ++block) {
        const char* scales = start;
        if constexpr (kScaled) start += weight.has_offsets ? 128 : 64;
        const int64_t num_steps = std::min(weight.block, weight.num_inputs - first) / 4;
        for (int64_t p = 0; p < count; ++p) start_block<kPlanes, kRows>(rows, block, sums[p]);
        for (int64_t step = 0; step < num_steps; step += kSteps) {
            const char* x = rows.x + kPlanes * (first + 4 * step);
            const int64_t num = std::min(kSteps, num_steps - step);
            const char* at = start + step * kStepBytes;
            for (int64_t p = 0; p < count; ++p, at += weight.panel_bytes)
                multiply<kNumbers, kPlanes, kRows>(x, rows.stride, at, num, kAheadOfStream, sums[p]);
        }
        start += num_steps * kStepBytes;
        for (int64_t p = 0; p < count; ++p)
            add_block<kPlanes, kScaled, kRows>(rows, block, scales + p * weight.panel_bytes,
                                               weight.has_offsets, sums[p], totals[p]);
    }
    for (int64_t p = 0; p < count; ++p) finish<kRows>(job, totals[p], row, panel + p);
}

using RunTile = void (*)(const Job&, int64_t, int64_t);
using RunStreams = void (*)(const Job&, int64_t, int64_t, int64_t);

template <Numbers kNumbers, int kPlanes, bool kScaled, int... kRows>
constexpr std::array<RunTile, sizeof...(kRows) + 1> tiles_of(std::integer_sequence<int, kRows...>) {
    return {nullptr, run_tile<kNumbers, kPlanes, kScaled, kRows + 1>...};
}
template <Numbers kNumbers, int kPlanes, bool kScaled, int... kRows>
constexpr std::array<RunStreams, sizeof...(kRows) + 1> streams_of(
    std::integer_sequence<int, kRows...>) {
    return {nullptr, run_streams<kNumbers, kPlanes, kScaled, kRows + 1>...};
}
// By the number of rows.
template <Numbers kNumbers, int kPlanes, bool kScaled>
constexpr auto kTiles = tiles_of<kNumbers, kPlanes, kScaled>(
    std::make_integer_sequence<int, most_rows(kPlanes)>());
template <Numbers kNumbers, int kPlanes, bool kScaled>
constexpr auto kRunStreams = streams_of<kNumbers, kPlanes, kScaled>(
    std::make_integer_sequence<int, few_rows(kNumbers, kPlanes)>());

// What runs a weight's tiles, by their number of rows.
struct Tiles {
    const RunTile* tiles;
    const RunStreams* streams;
    int64_t most_few;  // rows that run as streams
};
template <Numbers kNumbers, int kPlanes, bool kScaled>
Tiles tiles_of_kind() {
    return {kTiles<kNumbers, kPlanes, kScaled>.data(),
            kRunStreams<kNumbers, kPlanes, kScaled>.data(), few_rows(kNumbers, kPlanes)};
}

Tiles tiles_for(const QuantizedLinear& weight) {
    if (weight.is_fp4) return tiles_of_kind<kFp4, 2, true>();
    if (weight.bits == 4) return tiles_of_kind<kHalfBytes, 2, true>();
    if (weight.num_planes == 1)
        return weight.has_scales ? tiles_of_kind<kBytes, 1, true>() : tiles_of_kind<kBytes, 1, false>();
    return weight.has_scales ? tiles_of_kind<kBytes, 2, true>() : tiles_of_kind<kBytes, 2, false>();
}

// Rows [first, last) by one panel, in tiles of nearly equal size.
void run_panel(const Job& job, const RunTile* tiles, int64_t first, int64_t last, int64_t panel) {
    const int64_t most = most_rows(job.weight->num_planes);
    const int64_t num_tiles = (last - first + most - 1) / most;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t from = first + (last - first) * tile / num_tiles;
        const int64_t to = first + (last - first) * (tile + 1) / num_tiles;
        tiles[to - from](job, from, panel);
    }
}

void round_rows(const QuantizedLinear& weight, const bf16* x, char* rows, int64_t num_rows) {
    const auto round = [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            round_row(weight, x + row * weight.num_inputs, rows + row * weight.row_bytes);
    };
    if (num_rows <= kRowsOfOneThread) {
        round(0, num_rows);
        return;
    }
    const auto num_chunks = static_cast<int>((num_rows + kRowsOfOneThread - 1) / kRowsOfOneThread);
    pool().for_each(num_chunks, [&](int chunk) {
        round(chunk * kRowsOfOneThread, std::min((chunk + 1) * kRowsOfOneThread, num_rows));
    });
}

}  // namespace
}  // namespace stemma

using namespace stemma;

// rounded: num_rows * row_bytes of memory for the call's own use, 64-byte aligned.
extern "C" void stemma_quantized_linear(const QuantizedLinear* weight, const void* x, void* y,
                                        int64_t num_rows, void* rounded) {
    if (num_rows == 0) return;
    auto* rows = static_cast<char*>(rounded);
    round_rows(*weight, static_cast<const bf16*>(x), rows, num_rows);
    const Job job{weight, rows, y, num_rows};
    const Tiles of_weight = tiles_for(*weight);
    const bool are_few = num_rows <= of_weight.most_few;
    const auto run_chunk = [&](int64_t first, int64_t last, int64_t panel, int64_t end) {
        if (are_few) {
            for_each_streams(panel, end, [&](int64_t from, int64_t count) {
                of_weight.streams[last - first](job, first, from, count);
            });
            return;
        }
        for (int64_t p = panel; p < end; ++p) run_panel(job, of_weight.tiles, first, last, p);
    };
    for_each_chunk(num_rows, rows_of_block(weight->row_bytes, most_rows(1)), weight->num_panels,
                   are_few ? panels_of_few_rows(weight->num_panels) : 1, weight->panel_bytes,
                   run_chunk);
}

namespace {

// The row of the weight that is a lane of a panel; -1: none.
int64_t row_of_lane(const QuantizedLinear& weight, int64_t panel, int lane) {
    if (weight.kind < kGatedSilu) {
        const int64_t row = panel * kPanel + lane;
        return row < weight.num_outputs ? row : -1;
    }
    const int64_t row = panel * (kPanel / 2) + lane % 16;  // of gates, and of ups behind them
    if (row >= weight.num_outputs) return -1;
    return lane < 16 ? row : weight.num_outputs + row;
}

void pack_8_bits(const uint32_t* const (&rows)[kPanel], int64_t first, int64_t num_steps, char* to) {
    auto* out = reinterpret_cast<uint32_t*>(to);
    for (int64_t step = 0; step < num_steps; ++step)
        for (int lane = 0; lane < kPanel; ++lane)
            out[step * kPanel + lane] =
                (rows[lane] == nullptr ? 0 : rows[lane][first / 4 + step]) ^ 0x80808080u;
}

void pack_4_bits(const uint8_t* const (&rows)[kPanel], int64_t first, int64_t num_steps, char* to) {
    const auto number = [&](int lane, int64_t input) -> int {
        if (rows[lane] == nullptr) return 8;
        const int both = rows[lane][input / 2];
        return input % 2 ? both >> 4 : both & 15;
    };
    for (int64_t step = 0; step < num_steps; ++step)
        for (int lane = 0; lane < kPanel / 2; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int64_t input = first + 4 * step + i;
                *to++ = static_cast<char>(number(lane, input) | number(lane + 16, input) << 4);
            }
}

}  // namespace

// values as in quantized_weight.py; scales, offsets [rows, num_blocks] float16, or null.
extern "C" void stemma_pack_quantized(const QuantizedLinear* weight, const void* values,
                                      const uint16_t* scales, const uint16_t* offsets) {
    const int64_t value_bytes = weight->num_inputs * weight->bits / 8;
    const int64_t blocks = num_blocks(*weight);
    pool().for_each(static_cast<int>(weight->num_panels), [=](int panel) {
        char* to = static_cast<char*>(const_cast<void*>(weight->panels)) + panel * weight->panel_bytes;
        const uint8_t* bytes[kPanel];
        const uint32_t* words[kPanel];
        int64_t rows[kPanel];
        for (int lane = 0; lane < kPanel; ++lane) {
            rows[lane] = row_of_lane(*weight, panel, lane);
            bytes[lane] = rows[lane] < 0 ? nullptr
                                         : static_cast<const uint8_t*>(values) + rows[lane] * value_bytes;
            words[lane] = reinterpret_cast<const uint32_t*>(bytes[lane]);
        }
        for (int64_t block = 0; block < blocks; ++block) {
            for (const uint16_t* table : {scales, offsets}) {
                if (table == nullptr) continue;
                for (int lane = 0; lane < kPanel; ++lane)
                    reinterpret_cast<uint16_t*>(to)[lane] =
                        rows[lane] < 0 ? 0 : table[rows[lane] * blocks + block];
                to += 64;
            }
            const int64_t first = block * weight->block;
            const int64_t num_steps = std::min(weight->block, weight->num_inputs - first) / 4;
            if (weight->bits == 8) {
                pack_8_bits(words, first, num_steps, to);
            } else {
                pack_4_bits(bytes, first, num_steps, to);
            }
            to += num_steps * 16 * weight->bits;
        }
    });
}
