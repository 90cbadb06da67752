// Products of many rows by weights in bfloat16, on a CPU that multiplies floats only.
//
// The weights of some inputs by two panels become floats once for all rows, not once a tile: without
// their conversion, and with four registers of columns beside each other, a tile does little but
// multiply (on AVX512, for six rows by 64 columns, 24 multiply-adds and 10 loads an input). Floats
// stay in the first-level cache, sums there or in the second. Sums wait in memory for the next inputs; each still grows in
// ascending order of inputs, so its bits are those of a tile that keeps it in a register.
#pragma once

#include <algorithm>

#include "bf16.h"
#include "linear_output.h"
#include "panels.h"

namespace stemma {

constexpr int kPanelsAtOnce = 2;
constexpr int kColumns = kPanelsAtOnce * kPanel;
constexpr int kColumnGroups = kColumns / 16;
constexpr int kInputsAtOnce = 64;
constexpr int kFloatTileRows = 6;
// Registers of columns beside each other in a tile.
constexpr int kFloatTileGroups = kRegisters >= 32 ? 4 : 1;
constexpr int kPasses = kColumnGroups / kFloatTileGroups;  // of a tile over its inputs

// Two panels that lie behind each other.
struct PanelPair {
    const char* first;
    int64_t panel_bytes;
    bool is_last;  // nothing that follows is fetched

    const char* at(int panel, int64_t input) const {
        return first + panel * panel_bytes + input * 2 * kPanel;
    }
    // What a tile fetches while `depth` inputs from `input` on are multiplied: its share of what is
    // unpacked next, by turns of the first and of the second panel.
    Ahead ahead(int64_t input, int depth, int64_t tile, int64_t num_tiles) const {
        const bool ends = (input + depth) * 2 * kPanel >= panel_bytes;
        if (ends && is_last) return {first, 0};
        const char* next = ends ? first + 2 * panel_bytes : at(0, input + depth);
        const int64_t turns = (num_tiles + 1) / 2, bytes = depth * 2 * kPanel;
        const int64_t from = tile % 2 * panel_bytes + bytes * (tile / 2) / turns;
        return {next + from, (2 * kPanel + turns * kPasses - 1) / (turns * kPasses)};
    }
};

// to: [depth, kColumns]; depth: even.
inline void unpack(const PanelPair& panels, int64_t input, int depth, float* to) {
    for (int i = 0; i < depth; i += 2)
        for (int g = 0; g < kColumnGroups; ++g) {
            const Ints pairs = load_ints(panels.at(g / 2, input + i) + g % 2 * 64);
            store(to + i * kColumns + g * 16, as_floats(pairs << 16));
            store(to + (i + 1) * kColumns + g * 16,
                  as_floats(pairs & splat(static_cast<int32_t>(0xffff0000))));
        }
}

// sums [kRows, kColumns] += x [kRows, depth], its rows `stride` apart, by weights [depth, kColumns].
template <int kRows>
void add_float_products(const float* x, int64_t stride, const float* weights, int depth, Ahead ahead,
                        float* sums) {
    for (int from = 0; from < kColumns; from += 16 * kFloatTileGroups) {
        Floats tile[kRows][kFloatTileGroups];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int g = 0; g < kFloatTileGroups; ++g)
                tile[r][g] = load(sums + r * kColumns + from + g * 16);
        for (int i = 0; i < depth; ++i) {
            prefetch_stream(ahead.from);
            ahead.from += ahead.step;
            Floats column[kFloatTileGroups];
#pragma GCC unroll 4
            for (int g = 0; g < kFloatTileGroups; ++g)
                column[g] = load(weights + i * kColumns + from + g * 16);
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
                for (int g = 0; g < kFloatTileGroups; ++g)
                    tile[r][g] = add_product(tile[r][g], column[g], x[r * stride + i]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int g = 0; g < kFloatTileGroups; ++g)
                store(sums + r * kColumns + from + g * 16, tile[r][g]);
    }
}

// sums [num_rows, kColumns] = x [num_rows, num_inputs] by two panels. num_inputs: even.
inline void multiply_as_floats(const float* x, int64_t num_rows, int64_t num_inputs,
                               const PanelPair& panels, float* sums) {
    using Add = void (*)(const float*, int64_t, const float*, int, Ahead, float*);
    constexpr Add kAdd[] = {add_float_products<1>, add_float_products<2>, add_float_products<3>,
                            add_float_products<4>, add_float_products<5>, add_float_products<6>};
    alignas(64) static thread_local float weights[kInputsAtOnce * kColumns];
    std::fill_n(sums, num_rows * kColumns, 0.0f);
    const int64_t num_tiles = (num_rows + kFloatTileRows - 1) / kFloatTileRows;
    for (int64_t input = 0; input < num_inputs; input += kInputsAtOnce) {
        const int depth = static_cast<int>(std::min<int64_t>(kInputsAtOnce, num_inputs - input));
        unpack(panels, input, depth, weights);
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t from = num_rows * tile / num_tiles;
            const int64_t count = num_rows * (tile + 1) / num_tiles - from;
            kAdd[count - 1](x + from * num_inputs + input, num_inputs, weights, depth,
                            panels.ahead(input, depth, tile, num_tiles), sums + from * kColumns);
        }
    }
}

}  // namespace stemma
