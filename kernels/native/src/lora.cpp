// Low-rank adapters beside a linear layer for a few tokens: y += (x A.T) B.T, with A and B of each
// token's own adapter; y in bf16 or float32. Up to four tokens of one adapter share each load of A and
// B; x A.T is rounded to bf16 in between.
#include <algorithm>
#include <vector>

#include "bf16.h"
#include "native.h"

using namespace stemma;

namespace {

constexpr int kTokens = 4;
constexpr int64_t kRanks = 4;        // rows of A side by side: 16 sums with four tokens
constexpr int64_t kOutputs = 256;    // of y in a chunk
constexpr int64_t kFewOutputs = 16;  // in a register

// to[t][i] = a[i] . x[t] for N tokens and count <= kRanks rows of A.
template <int N>
void shrink(const bf16* x, const bf16* a, int64_t num_inputs, int64_t count, bf16* to,
            int64_t stride) {
    Floats sums[N][kRanks];
    for (int t = 0; t < N; ++t)
        for (int64_t i = 0; i < kRanks; ++i) sums[t][i] = zero_floats();
    const bf16* rows[kRanks];  // of A; past the last, the first one again, whose sums are dropped
    for (int64_t i = 0; i < kRanks; ++i) rows[i] = a + (i < count ? i : 0) * num_inputs;
    for (int64_t k = 0; k < num_inputs; k += 32) {
        const int64_t left = std::min<int64_t>(num_inputs - k, 32);
        Ints parts[N];
        for (int t = 0; t < N; ++t) parts[t] = load_pairs(x + t * num_inputs + k, left);
        for (int64_t i = 0; i < kRanks; ++i) {
            const Ints row = load_pairs(rows[i] + k, left);
            for (int t = 0; t < N; ++t) sums[t][i] = add_pair_products(sums[t][i], parts[t], row);
        }
    }
    for (int t = 0; t < N; ++t)
        for (int64_t i = 0; i < count; ++i)
            store_bf16(to + t * stride + i, splat(sum_of(sums[t][i])), 1);
}

// y[t][o] += b[o] . shrunk[t] for N tokens and count outputs, 16 at a time: a lane gathers pairs of
// its own row of B.
template <class Y, int N>
void expand(const bf16* shrunk, int64_t shrunk_stride, const bf16* b, int64_t rank, int64_t count,
            Y* y, int64_t stride) {
    for (int64_t o = 0; o < count; o += kFewOutputs) {
        const Mask lanes = lanes_below(count - o);
        Floats sums[N];
        for (int t = 0; t < N; ++t) sums[t] = load_numbers(y + t * stride + o, lanes);
        for (int64_t r = 0; r < rank; r += 2) {
            const Ints own =
                gather_strided(b + o * rank + r, static_cast<int32_t>(rank / 2), lanes);
            for (int t = 0; t < N; ++t) {
                int pair;
                __builtin_memcpy(&pair, shrunk + t * shrunk_stride + r, sizeof pair);
                sums[t] = add_pair_products(sums[t], splat(pair), own);
            }
        }
        for (int t = 0; t < N; ++t) store_numbers(y + t * stride + o, sums[t], lanes);
    }
}

constexpr decltype(&shrink<1>) kShrink[] = {shrink<1>, shrink<2>, shrink<3>, shrink<4>};
template <class Y>
constexpr decltype(&expand<Y, 1>) kExpand[] = {expand<Y, 1>, expand<Y, 2>, expand<Y, 3>,
                                               expand<Y, 4>};

template <class Y>
void add_lora(const LoraRuns& plan, const LoraTables& t, const void* x, Y* y) {
    const int64_t* runs = plan.runs;
    const int64_t num_ranks = t.num_modules * t.rank, num_outputs = t.ends[t.num_modules - 1];
    struct Block {
        int64_t slot, first, count;  // of tokens
        int64_t place;               // of its first token in `shrunk`
    };
    std::vector<Block> blocks;
    int64_t num_tokens = 0;
    for (int64_t run = 0; run < plan.num_runs; ++run)
        for (int64_t first = runs[run * 3 + 1]; first < runs[run * 3 + 2]; first += kTokens) {
            const int64_t count = std::min<int64_t>(runs[run * 3 + 2] - first, kTokens);
            blocks.push_back({runs[run * 3] - 1, first, count, num_tokens});
            num_tokens += count;
        }
    std::vector<bf16> shrunk(num_tokens * num_ranks);
    const int64_t num_parts = (num_ranks + kRanks - 1) / kRanks;
    pool().for_each(static_cast<int>(blocks.size() * num_parts), [&](int chunk) {
        const Block& block = blocks[chunk / num_parts];
        const int64_t first = chunk % num_parts * kRanks;
        const bf16* a =
            static_cast<const bf16*>(t.a) + (block.slot * num_ranks + first) * t.num_inputs;
        kShrink[block.count - 1](static_cast<const bf16*>(x) + block.first * t.num_inputs, a,
                                 t.num_inputs, std::min(num_ranks - first, kRanks),
                                 shrunk.data() + block.place * num_ranks + first, num_ranks);
    });
    const int64_t num_pieces = (num_outputs + kOutputs - 1) / kOutputs;
    pool().for_each(static_cast<int>(blocks.size() * num_pieces), [&](int chunk) {
        const Block& block = blocks[chunk / num_pieces];
        int64_t at = chunk % num_pieces * kOutputs;
        const int64_t last = std::min(at + kOutputs, num_outputs);
        for (int64_t module = 0; at < last; ++module) {
            const int64_t end = std::min(t.ends[module], last);
            if (end <= at) continue;
            const bf16* b =
                static_cast<const bf16*>(t.b) + (block.slot * num_outputs + at) * t.rank;
            kExpand<Y>[block.count - 1](
                shrunk.data() + block.place * num_ranks + module * t.rank, num_ranks, b, t.rank,
                end - at, y + block.first * num_outputs + at, num_outputs);
            at = end;
        }
    });
}

}  // namespace

// x [T, num_inputs], y [T, outputs of all modules]. rank is even.
extern "C" void stemma_lora(const LoraRuns* plan, const LoraTables* tables, const void* x, void* y,
                            int64_t is_float) {
    if (is_float) {
        add_lora(*plan, *tables, x, static_cast<float*>(y));
    } else {
        add_lora(*plan, *tables, x, static_cast<bf16*>(y));
    }
}
