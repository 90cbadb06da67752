// How a product of rows by packed panels of weights is shared out, and its weights fetched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "native.h"
#include "vector.h"

namespace stemma {

// Rows whose inputs stay in a core's second-level cache while all panels pass by, in bytes.
constexpr int64_t kBlockBytes = 256 << 10;
// The longest chunk of panels, in bytes of weights, or as many panels as are passed at once.
constexpr int64_t kChunkBytes = 1 << 20;
// Of what is left a chunk is at most one part in so many for each thread (guided self-scheduling,
// Polychronopoulos and Kuck, 1987): all threads end about together, the last after the panels that it
// passes at once.
constexpr int64_t kPartsOfRest = 2;
inline int64_t parts_of_rest() { return kPartsOfRest * pool().num_threads(); }
// Weights that are passed a panel at a time are fetched so far ahead: across the end of a page of
// 4 KB, where the processor's own prefetching stops.
constexpr int64_t kAheadBytes = 4096;

// What few rows take is the time in which weights are read, and a core reads several streams faster
// than one: two cores of an Ice Lake Xeon 25 GB/s of one each, 28 of eight, 29.6 of sixteen. So few
// rows pass up to kStreams panels at once, some inputs at a time by one panel after the other; the
// panels' sums lie in memory meanwhile.
constexpr int64_t kStreams = 8;
// Each is fetched so far ahead.
constexpr int64_t kAheadOfStream = 512;
// A chunk has a multiple of so many panels, but for the last ones, unless threads would go without.
constexpr int64_t kStreamsOfChunk = 4;

// Of how many panels a chunk of few rows is a multiple.
inline int64_t panels_of_few_rows(int64_t num_panels) {
    return std::clamp<int64_t>(num_panels / parts_of_rest(), 1, kStreamsOfChunk);
}

// Calls run(panel, count) until panels [panel, end) are passed, nearly as many each time, kStreams at
// most.
template <class F>
void for_each_streams(int64_t panel, int64_t end, F&& run) {
    const int64_t count = end - panel, num_times = (count + kStreams - 1) / kStreams;
    for (int64_t time = 0; time < num_times; ++time) {
        const int64_t from = count * time / num_times, to = count * (time + 1) / num_times;
        run(panel + from, to - from);
    }
}

// What a tile fetches while it multiplies a panel: `step` bytes for each 128 of the panel's.
struct Ahead {
    const char* from;
    int64_t step;

    STEMMA_INLINE void fetch() {
        prefetch_stream(from);
        prefetch_stream(from + step / 2);
        from += step;
    }
};
// Where a panel is passed by one tile only, what is due next in it; else each tile fetches its share
// of the panel after it, so that memory is read all the time instead of during the first tile. (Of
// the last panel of a chunk, nothing.)
inline Ahead ahead_of(const char* panel, int64_t panel_bytes, int64_t tile, int64_t num_tiles,
                      bool is_last) {
    if (num_tiles == 1) return {panel + kAheadBytes, 128};
    if (is_last) return {panel, 0};
    return {panel + panel_bytes + panel_bytes * tile / num_tiles, (127 + num_tiles) / num_tiles};
}

// Whole tiles whose inputs are kBlockBytes at most, or one tile. row_bytes: of a row's inputs.
inline int64_t rows_of_block(int64_t row_bytes, int64_t rows_a_tile) {
    return std::max<int64_t>(kBlockBytes / row_bytes / rows_a_tile, 1) * rows_a_tile;
}

// Calls run(first, last, panel, end), on any thread: rows [first, last), most_rows at most, by panels
// [panel, end), a multiple of panels_at_once but for the last ones.
template <class F>
void for_each_chunk(int64_t num_rows, int64_t most_rows, int64_t num_panels, int64_t panels_at_once,
                    int64_t panel_bytes, F&& run) {
    if (num_rows == 0) return;
    const int64_t num_blocks = (num_rows + most_rows - 1) / most_rows;
    const int64_t block = (num_rows + num_blocks - 1) / num_blocks;
    const int64_t longest =
        std::max<int64_t>(kChunkBytes / panel_bytes / panels_at_once, 1) * panels_at_once;
    const int64_t parts = parts_of_rest();
    thread_local std::vector<int64_t> starts;
    starts.clear();
    for (int64_t panel = 0; panel < num_panels;) {
        starts.push_back(panel);
        const int64_t size = std::min(longest, (num_panels - panel + parts - 1) / parts);
        panel += (size + panels_at_once - 1) / panels_at_once * panels_at_once;
    }
    starts.push_back(num_panels);
    const auto count = static_cast<int64_t>(starts.size()) - 1;
    const int64_t* of_chunk = starts.data();
    pool().for_each(static_cast<int>(num_blocks * count), [&, of_chunk](int chunk) {
        const int64_t first = chunk / count * block, at = chunk % count;
        run(first, std::min(first + block, num_rows), of_chunk[at],
            std::min(of_chunk[at + 1], num_panels));
    });
}

}  // namespace stemma
