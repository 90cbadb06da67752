// Linear layers with float32 sums over weights packed once at load, in bfloat16 and in float32.
//
// A packed weight is a row of panels. A panel is 32 output columns: for each pair of inputs
// (k, k + 1), 32 pairs of weights, in the order in which vdpbf16ps reads them, so that a panel is
// one stream of memory; in float32 a number takes the place of a pair. Each output is summed over k in ascending order in one register lane,
// whatever the number of rows: a row's result does not depend on the rows beside it.
//
// A tile is some rows by one panel, whose sums stay in registers: two loads of weights and one
// broadcast a row for two multiply-adds each. Few rows pass several panels at a time, since reading
// weights is what takes them their time, and a core reads several streams faster than one. Many rows
// by bfloat16 on a CPU without its products go another way to the same bits: float_products.h.
#include <array>
#include <atomic>
#include <utility>
#include <vector>

#include "bf16.h"
#include "float_products.h"
#include "linear_output.h"
#include "native.h"
#include "panels.h"

namespace stemma {
namespace {

// Of 32 registers a tile takes 20 for sums (with 24 the compiler spills and loses a tenth), of 8, 6 (of
// ARM's 5): by both halves of a panel while its rows are few, else by one after the other.
#if defined(__aarch64__)
constexpr int kMostSums = 5;
#else
constexpr int kMostSums = kRegisters >= 32 ? 20 : 6;
#endif
constexpr int kTileRows = kRegisters >= 32 ? kMostSums / 2 : kMostSums;
constexpr int halves_at_once(int rows) { return 2 * rows <= kMostSums ? 2 : 1; }

// So few rows pass several panels at once; with more, moving their sums takes longer than it saves.
constexpr int kFewRows = std::min(kMostSums / 2, 6);

// What is multiplied in the inner loop, and in how many steps.
struct Bf16Products {
    using Number = bf16;
    using Input = Pair;
    static constexpr int kSteps = kPairSteps;
    template <int kStep>
    static auto weights(Ints packed) {
        return column_of<kStep>(packed);
    }
    template <int kStep, class Weights>
    static Floats add(Floats sum, Weights weights, const Pair& input) {
        return add_products<kStep>(sum, weights, input);
    }
};
struct FloatProducts {
    using Number = float;
    using Input = float;
    static constexpr int kSteps = 1;
    template <int>
    static Floats weights(Ints packed) {
        return as_floats(packed);
    }
    template <int>
    static Floats add(Floats sum, Floats weights, float input) {
        return add_product(sum, weights, input);
    }
};

// One step for all rows of a tile; x: an input of each row, num_inputs apart.
template <class Products, int kStep, int kRows, int kHalves>
inline void add_step(const typename Products::Input* x, int64_t num_inputs, const char* packed,
                     Floats (&sums)[kRows][kHalves]) {
    decltype(Products::template weights<kStep>(Ints{})) weights[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h)
        weights[h] = Products::template weights<kStep>(load_ints(packed + h * 64));
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h)
            sums[r][h] = Products::template add<kStep>(sums[r][h], weights[h], x[r * num_inputs]);
}

struct Job {
    const PackedLinear* weight;
    void* y;
    int64_t num_rows;
    int64_t num_inputs;  // of a row: pairs of bfloat16, or floats

    int64_t panel_bytes() const { return num_inputs * 4 * kPanel; }
    const char* panel(int64_t at) const {
        return static_cast<const char*>(weight->panels) + at * panel_bytes();
    }
};

// Adds the products of inputs [from, to) by kHalves halves of a panel, the first at `panel`.
template <class Products, int kRows, int kHalves>
inline void multiply(const typename Products::Input* x, int64_t num_inputs, int64_t from, int64_t to,
                     const char* panel, Ahead ahead, Floats (*all)[2], int first) {
    Floats sums[kRows][kHalves];
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) sums[r][h] = all[r][first + h];
    for (int64_t i = from; i < to; ++i) {
        const char* packed = panel + i * 128;
        ahead.fetch();
        add_step<Products, 0>(x + i, num_inputs, packed, sums);
        if constexpr (Products::kSteps == 2)
            add_step<Products, 1>(x + i, num_inputs, packed, sums);
    }
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) all[r][first + h] = sums[r][h];
}

template <class Products, int kRows>
inline void finish(const Job& job, Floats (*sums)[2], int64_t row, int64_t panel) {
    const PackedLinear& weight = *job.weight;
    const LinearOutput output{weight.bias, job.y, weight.num_outputs, weight.kind};
    for (int r = 0; r < kRows; ++r)
        finish_row<typename Products::Number>(output, sums[r][0], sums[r][1], row + r, panel);
}

// x: of the tile's first row.
template <class Products, int kRows>
void run_tile(const Job& job, const void* x, int64_t row, int64_t panel, Ahead ahead) {
    const auto* inputs = static_cast<const typename Products::Input*>(x);
    const char* start = job.panel(panel);
    Floats sums[kRows][2];
#pragma GCC unroll 10
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero_floats();
    constexpr int kHalves = halves_at_once(kRows);
    for (int half = 0; half < 2; half += kHalves) {
        multiply<Products, kRows, kHalves>(inputs, job.num_inputs, 0, job.num_inputs,
                                           start + half * 64, ahead, sums, half);
    }
    finish<Products, kRows>(job, sums, row, panel);
}

// Few rows by `count` panels, kStreams at most: some inputs at a time by one panel after the other,
// whose sums lie in memory meanwhile.
template <class Products, int kRows>
void run_streams(const Job& job, const void* x, int64_t row, int64_t panel, int64_t count) {
    const auto* inputs = static_cast<const typename Products::Input*>(x);
    constexpr int64_t kInputs = kRows <= 2 ? 2 : 4;
    Floats sums[kStreams][kRows][2];
    for (int64_t p = 0; p < count; ++p)
        for (int r = 0; r < kRows; ++r) sums[p][r][0] = sums[p][r][1] = zero_floats();
    for (int64_t from = 0; from < job.num_inputs; from += kInputs) {
        const int64_t to = std::min(from + kInputs, job.num_inputs);
        for (int64_t p = 0; p < count; ++p) {
            const char* start = job.panel(panel + p);
            const Ahead ahead{start + from * 128 + kAheadOfStream, 128};
            multiply<Products, kRows, 2>(inputs, job.num_inputs, from, to, start, ahead, sums[p], 0);
        }
    }
    for (int64_t p = 0; p < count; ++p) finish<Products, kRows>(job, sums[p], row, panel + p);
}

using RunTile = void (*)(const Job&, const void*, int64_t, int64_t, Ahead);
template <class Products, int... kRows>
constexpr std::array<RunTile, kTileRows + 1> tiles_of(std::integer_sequence<int, kRows...>) {
    return {nullptr, run_tile<Products, kRows + 1>...};
}
// By the number of rows.
template <class Products>
constexpr auto kRunTile = tiles_of<Products>(std::make_integer_sequence<int, kTileRows>());

using RunStreams = void (*)(const Job&, const void*, int64_t, int64_t, int64_t);
template <class Products, int... kRows>
constexpr std::array<RunStreams, kFewRows + 1> streams_of(std::integer_sequence<int, kRows...>) {
    return {nullptr, run_streams<Products, kRows + 1>...};
}
template <class Products>
constexpr auto kRunStreams = streams_of<Products>(std::make_integer_sequence<int, kFewRows>());

// Rows [first, last) by one panel, in tiles of nearly equal size. x: of row `first`; is_last: of the
// panels that the thread is about to pass.
template <class Products>
void run_panel(const Job& job, const typename Products::Input* x, int64_t first, int64_t last,
               int64_t panel, bool is_last) {
    const int64_t num_tiles = (last - first + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t from = first + (last - first) * tile / num_tiles;
        const int64_t to = first + (last - first) * (tile + 1) / num_tiles;
        const auto ahead =
            ahead_of(job.panel(panel), job.panel_bytes(), tile, num_tiles, is_last);
        kRunTile<Products>[to - from](job, x + (from - first) * job.num_inputs, from, panel, ahead);
    }
}

// Rows [first, first + count) as the products take them. A thread converts them once a block, which
// a call and its first row name.
const Pair* inputs_of(const bf16* x, int64_t first, int64_t count, int64_t num_inputs, uint64_t call) {
    const bf16* rows = x + first * num_inputs * 2;
    if constexpr (kPairsAreBf16) return reinterpret_cast<const Pair*>(rows);
    thread_local std::vector<Pair> pairs;
    thread_local uint64_t last_call = 0;
    thread_local int64_t last_first = 0;
    if (call != last_call || first != last_first) {
        pairs.resize(count * num_inputs);
        copy_pairs(rows, count * num_inputs * 2, pairs.data());
        last_call = call;
        last_first = first;
    }
    return pairs.data();
}
const float* inputs_of(const float* x, int64_t first, int64_t, int64_t num_inputs, uint64_t) {
    return x + first * num_inputs;
}

// From so many rows on unpacking weights of bfloat16 pays, and so many of them share it.
constexpr int64_t kManyRows = 40, kMostRows = 96;

// Rows [first, last) by panels [panel, end), an even number of them, as floats.
template <class Products>
void run_as_floats(const Job& job, const typename Products::Input* x, int64_t first, int64_t last,
                   int64_t panel, int64_t end) {
    alignas(64) static thread_local float sums[kMostRows * kColumns];
    const PackedLinear& weight = *job.weight;
    const LinearOutput output{weight.bias, job.y, weight.num_outputs, weight.kind};
    for (; panel < end; panel += kPanelsAtOnce) {
        const PanelPair panels{job.panel(panel), job.panel_bytes(), panel + kPanelsAtOnce == end};
        multiply_as_floats(reinterpret_cast<const float*>(x), last - first, weight.num_inputs, panels,
                           sums);
        for (int64_t row = first; row < last; ++row)
            for (int half = 0; half < kPanelsAtOnce; ++half) {
                const float* of_row = sums + (row - first) * kColumns + half * kPanel;
                finish_row(output, load(of_row), load(of_row + 16), row, panel + half);
            }
    }
}

template <class Products>
void run(const PackedLinear& weight, const void* x, void* y, int64_t num_rows) {
    using Number = typename Products::Number;
    constexpr bool kMayUnpack = Products::kSteps == 2;
    const bool are_many = kMayUnpack && num_rows >= kManyRows, are_few = num_rows <= kFewRows;
    const int64_t row_bytes = weight.num_inputs * static_cast<int64_t>(sizeof(Number));
    const Job job{&weight, y, num_rows, row_bytes / 4};
    const auto input_bytes = job.num_inputs * static_cast<int64_t>(sizeof(typename Products::Input));
    static std::atomic<uint64_t> num_calls{0};
    const uint64_t call = ++num_calls;
    const auto run_chunk = [&](int64_t first, int64_t last, int64_t panel, int64_t end) {
        const auto* inputs = inputs_of(static_cast<const Number*>(x), first, last - first,
                                       job.num_inputs, call);
        if constexpr (kMayUnpack) {
            const int64_t middle = are_many ? end - (end - panel) % kPanelsAtOnce : panel;
            run_as_floats<Products>(job, inputs, first, last, panel, middle);
            panel = middle;
        }
        if (are_few) {
            const RunStreams run_streams = kRunStreams<Products>[last - first];
            for_each_streams(panel, end, [&](int64_t from, int64_t count) {
                run_streams(job, inputs, first, from, count);
            });
            return;
        }
        for (int64_t p = panel; p < end; ++p)
            run_panel<Products>(job, inputs, first, last, p, p + 1 == end);
    };
    const int64_t most_rows = are_many ? kMostRows : rows_of_block(input_bytes, kTileRows);
    const int64_t panels_at_once =
        are_many ? kPanelsAtOnce : are_few ? panels_of_few_rows(weight.num_panels) : 1;
    for_each_chunk(num_rows, most_rows, weight.num_panels, panels_at_once, job.panel_bytes(),
                   run_chunk);
}

}  // namespace
}  // namespace stemma

using namespace stemma;

extern "C" void stemma_linear(const PackedLinear* weight, const void* x, void* y,
                              int64_t num_rows) {
    const auto run_all = weight->is_float ? run<FloatProducts> : run<Bf16Products>;
    run_all(*weight, x, y, num_rows);
}

// weight: num_panels * 32 rows of num_pairs times 4 bytes, in the order of the panels' lanes.
extern "C" void stemma_pack(const void* weight, int64_t num_rows, int64_t num_pairs, void* panels) {
    const auto* from = static_cast<const uint32_t*>(weight);
    auto* to = static_cast<uint32_t*>(panels);
    const int num_panels = static_cast<int>((num_rows + kPanel - 1) / kPanel);
    pool().for_each(num_panels, [=](int panel) {
        for (int64_t lane = 0; lane < kPanel; ++lane) {
            const int64_t row = static_cast<int64_t>(panel) * kPanel + lane;
            for (int64_t pair = 0; pair < num_pairs; ++pair)
                to[(panel * num_pairs + pair) * kPanel + lane] =
                    row < num_rows ? from[row * num_pairs + pair] : 0;
        }
    });
}
