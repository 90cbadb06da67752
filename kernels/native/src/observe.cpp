// The attention that keys get from a sequence's last queries, summed over these (ops.Observe).
//
// Each query's scores over all keys that it sees are a row of a buffer; four rows at a time, so that
// a key that is loaded is multiplied by four queries. Then one pass for the largest, one for the
// powers and their sum, and one that adds the probabilities to the keys' sums.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bf16.h"
#include "native.h"
#include "vector.h"

namespace stemma {
namespace {

constexpr int kRows = 4;
constexpr int kKeysEach = 64;  // of a packed block
constexpr float kLog2OfE = 1.44269504088896341f;

struct Observed {
    const float* q;     // [num_kv_heads, num_rows, dims]: a head's queries, one after the other
    const float* keys;  // [num_kv_heads, num_blocks, dims, kKeysEach]
    float* sums;        // [num_parts, num_kv_heads, num_blocks * kKeysEach]
    int64_t num_kv_heads, num_queries, num_rows, num_keys, dims, num_parts;
    float scale, soft_cap;  // 0: none

    int64_t num_blocks() const { return (num_keys + kKeysEach - 1) / kKeysEach; }
    // Row r is query r / (num_rows / num_queries).
    int64_t num_seen(int64_t row) const {
        return num_keys - num_queries + 1 + row / (num_rows / num_queries);
    }
};

// scores [kRows, stride] of `count` rows against all blocks that the last of them sees.
void multiply(const Observed& o, const float* q, const float* keys, int count, int64_t num_blocks,
              float* scores, int64_t stride) {
    const Floats factor = splat(o.scale);
    for (int64_t at = 0; at < num_blocks * kKeysEach; at += 16) {
        const float* key = keys + at / kKeysEach * kKeysEach * o.dims + at % kKeysEach;
        Floats s[kRows];
        for (auto& sum : s) sum = zero_floats();
        for (int64_t dim = 0; dim < o.dims; ++dim) {
            const Floats k = load(key + dim * kKeysEach);
            for (int row = 0; row < kRows; ++row)
                s[row] = fmadd(splat(q[std::min(row, count - 1) * o.dims + dim]), k, s[row]);
        }
        for (int row = 0; row < count; ++row) {
            Floats score = s[row] * factor;
            if (o.soft_cap > 0)
                score = splat(o.soft_cap) * tanh(score / splat(o.soft_cap));
            store(scores + row * stride + at, score);
        }
    }
}

// sums += softmax of a row's first num_seen scores; the row is overwritten.
void add_probabilities(float* scores, int64_t num_seen, float* sums) {
    Floats top = splat(-INFINITY);
    for (int64_t at = 0; at < num_seen; at += 16) {
        const Mask lanes = lanes_below(num_seen - at);
        const Floats s = select(choice(lanes), load(scores + at), splat(-INFINITY));
        store(scores + at, s);
        top = max(top, s);
    }
    const Floats factor = splat(kLog2OfE), shift = splat(largest_of(top)) * factor;
    Floats total = zero_floats();
    for (int64_t at = 0; at < num_seen; at += 16) {
        const Floats p = exp2_nonpositive_exactly(fmsub(load(scores + at), factor, shift));
        store(scores + at, p);
        total = total + p;
    }
    const Floats share = splat(1.0f / sum_of(total));
    for (int64_t at = 0; at < num_seen; at += 16)
        store(sums + at, fmadd(load(scores + at), share, load(sums + at)));
}

void observe(const Observed& o) {
    const int64_t stride = o.num_blocks() * kKeysEach;
    pool().for_each(static_cast<int>(o.num_parts * o.num_kv_heads), [&](int chunk) {
        const int64_t head = chunk % o.num_kv_heads, part = chunk / o.num_kv_heads;
        float* sums = o.sums + chunk * stride;
        std::fill_n(sums, stride, 0.0f);
        thread_local std::vector<float> scores;
        scores.resize(kRows * stride);
        const float* keys = o.keys + head * stride * o.dims;
        for (int64_t row = part * kRows; row < o.num_rows; row += o.num_parts * kRows) {
            const int count = static_cast<int>(std::min<int64_t>(kRows, o.num_rows - row));
            const int64_t most = o.num_seen(row + count - 1);
            multiply(o, o.q + (head * o.num_rows + row) * o.dims, keys, count,
                     (most + kKeysEach - 1) / kKeysEach, scores.data(), stride);
            for (int each = 0; each < count; ++each)
                add_probabilities(scores.data() + each * stride, o.num_seen(row + each), sums);
        }
    });
}

}  // namespace
}  // namespace stemma

// See struct Observed; num_rows a multiple of num_queries, a query's heads beside each other.
extern "C" void stemma_observe(const float* q, const float* keys, float* sums,
                               int64_t num_kv_heads, int64_t num_queries, int64_t num_rows,
                               int64_t num_keys, int64_t dims, int64_t num_parts, double scale,
                               double soft_cap) {
    stemma::observe({q, keys, sums, num_kv_heads, num_queries, num_rows, num_keys, dims, num_parts,
                     static_cast<float>(scale), static_cast<float>(soft_cap)});
}
