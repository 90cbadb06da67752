// A step's attention as a work list, and what all kernels do with it: units, partial results, merges.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16.h"
#include "native.h"

namespace stemma {

constexpr float kLog2E = 1.44269504f;

// Mirrored by numpy in paged_attention.py.
struct Item {
    int32_t token;        // first query token
    int32_t num_tokens;   // >= 1
    int32_t first_slot;   // index into the slots
    int32_t num_keys;     // >= 1
    // The first token sees keys [num_hidden, num_visible) of these, the next one starts and ends one
    // key later. Where nothing is hidden, num_hidden is -num_tokens or less.
    int32_t num_visible;
    int32_t num_hidden;
    int32_t partial;      // index of the first token's partial, or -1: the result is final

    // The keys that any of the tokens sees come before this one.
    int num_seen() const { return std::min(num_keys, num_visible + num_tokens - 1); }
};

// A step's plan, which all layers share.
struct Plan {
    const Item* items;
    const int32_t* slots;
    int64_t num_items;
    float* partials;  // [P, num_heads, head_dim + 2]: values, largest score, sum
    // Partials of merged_tokens[i]: merged_partials[merged_first[i]] .. [merged_first[i + 1]].
    const int32_t* merged_tokens;
    const int32_t* merged_first;
    const int32_t* merged_partials;
    int64_t num_merged;
    int64_t num_slots;
    int64_t values_at;  // elements of KV from the keys to the values; 0: a key is a value too
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t format;  // KVFormat
    float scale;     // of the scores
    float soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: they stay
};

struct Attention : Plan {
    const void* q;        // bf16 or float, as out and plain KV
    int64_t q_stride;     // elements from token to token
    const void* kv;       // [2, num_kv_heads, num_slots, head_dim], in 4 bits half as many bytes
    const float* scales;  // [2, num_kv_heads, num_slots], or null; in 4 bits 4 bytes
    const float* sinks;   // [num_heads] scores of a key without a value, or null
    void* out;            // [T, num_heads, head_dim]

    // What the scores that rows keep are multiplied by in the softmax.
    float softmax_scale() const { return soft_cap > 0 ? 1.0f : scale; }
};

// A thread's buffers, grown to the largest unit it has seen.
class Workspace {
  public:
    // What was taken before is free again. size: of all that is taken now, in bytes, and kAlignment
    // for each take.
    void begin(size_t size) {
        if (bytes_.size() < size + kAlignment) bytes_.resize(size + kAlignment);
        at_ = reinterpret_cast<char*>(aligned(reinterpret_cast<uintptr_t>(bytes_.data())));
    }
    // At the start of a cache line.
    template <class T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(at_);
        at_ += aligned(count * sizeof(T));
        return taken;
    }

    static constexpr size_t kAlignment = 64;

  private:
    static size_t aligned(size_t at) { return (at + kAlignment - 1) / kAlignment * kAlignment; }
    std::vector<char> bytes_;
    char* at_ = nullptr;
};

// A softmax's sum with its largest score: sum of exp(score - largest), in the units of kept scores.
struct Sum {
    float largest, total;

    // With a head's sink, if there are any: a score more, whose value is zero.
    Sum with_sink(const Attention& a, int head) const {
        if (a.sinks == nullptr) return *this;
        const float scale = a.softmax_scale(), sink = a.sinks[head] / scale;
        const float top = std::max(largest, sink);
        return {top, std::exp((largest - top) * scale) * total + std::exp((sink - top) * scale)};
    }
    // Of what was summed with the largest score `other`, in the mean.
    float weight_of(float other, float scale) const {
        return std::exp((other - largest) * scale) / total;
    }
};

// What a row's keys came to: out = sums / total where they are all of its token's, else a partial.
// row: of an item by a KV head, token by token, then by query head.
template <class Number>
void finish_row(const Attention& a, const Item& item, int kv_head, int row, const float* sums,
                float largest, float total) {
    const int group = a.num_heads / a.num_kv_heads, dims = a.head_dim;
    const int token = row / group, head = kv_head * group + row % group;
    if (item.partial < 0) {
        auto* out = static_cast<Number*>(a.out) +
                    (static_cast<int64_t>(item.token + token) * a.num_heads + head) * dims;
        const Sum sum = Sum{largest, total}.with_sink(a, head);
        const Floats factor = splat(sum.weight_of(largest, a.softmax_scale()));
        for (int dim = 0; dim < dims; dim += 16)
            store_numbers(out + dim, (factor * load(sums + dim)), 0xffff);
    } else {
        float* to = a.partials +
                    (static_cast<int64_t>(item.partial + token) * a.num_heads + head) * (dims + 2);
        std::memcpy(to, sums, sizeof(float) * dims);
        to[dims] = largest;
        to[dims + 1] = total;
    }
}

// out = the weighted mean of the partials at[0] .. at[count - 1].
template <class Number>
void merge_token(const Attention& a, int token, const int32_t* at, int count) {
    const int dims = a.head_dim;
    const float scale = a.softmax_scale();
    for (int head = 0; head < a.num_heads; ++head) {
        const auto part = [&](int i) {
            return a.partials + (static_cast<int64_t>(at[i]) * a.num_heads + head) * (dims + 2);
        };
        float largest = -INFINITY;
        for (int i = 0; i < count; ++i) largest = std::max(largest, part(i)[dims]);
        float total = 0.0f;
        for (int i = 0; i < count; ++i)
            total += std::exp((part(i)[dims] - largest) * scale) * part(i)[dims + 1];
        const Sum all = Sum{largest, total}.with_sink(a, head);
        auto* out = static_cast<Number*>(a.out) +
                    (static_cast<int64_t>(token) * a.num_heads + head) * dims;
        for (int dim = 0; dim < dims; dim += 16) {
            Floats sum = zero_floats();
            for (int i = 0; i < count; ++i) {
                const float weight = all.weight_of(part(i)[dims], scale);
                sum = fmadd(splat(weight), load(part(i) + dim), sum);
            }
            store_numbers(out + dim, sum, 0xffff);
        }
    }
}

// What a thread computes at a time: an item by a KV head. No item: nothing.
struct Unit {
    const Item* item = nullptr;
    int kv_head = 0;
};

// Runs run(unit, next) for all units, then merges tokens that several items served. next: what this
// thread probably runs then.
template <class Number, class F>
void run_plan(const Attention& a, F&& run) {
    const int num_threads = pool().num_threads();
    const int num_units = static_cast<int>(a.num_items * a.num_kv_heads);
    const auto unit_at = [&a, num_units](int i) {
        return i < num_units ? Unit{a.items + i / a.num_kv_heads, i % a.num_kv_heads} : Unit{};
    };
    // So short that threads end together: an eighth of a thread's share, by keys of query tokens.
    int64_t total = 0, largest = 1;
    for (const Item* item = a.items; item < a.items + a.num_items; ++item) {
        const int64_t size = static_cast<int64_t>(item->num_tokens) * item->num_seen();
        total += size;
        largest = std::max(largest, size);
    }
    const int run_length = static_cast<int>(std::clamp<int64_t>(
        total * a.num_kv_heads / (8 * num_threads * largest), 1, a.num_kv_heads));
    pool().for_each((num_units + run_length - 1) / run_length, [&](int chunk) {
        const int first = chunk * run_length, last = std::min(num_units, first + run_length) - 1;
        for (int i = first; i < last; ++i) run(unit_at(i), unit_at(i + 1));
        run(unit_at(last), unit_at(first + num_threads * run_length));
    });
    if (a.num_merged == 0) return;
    constexpr int kTokens = 16;
    pool().for_each(static_cast<int>((a.num_merged + kTokens - 1) / kTokens), [&](int chunk) {
        const int64_t last = std::min<int64_t>(a.num_merged, (chunk + 1) * kTokens);
        for (int64_t i = chunk * kTokens; i < last; ++i) {
            const int32_t first = a.merged_first[i];
            merge_token<Number>(a, a.merged_tokens[i], a.merged_partials + first,
                                a.merged_first[i + 1] - first);
        }
    });
}

}  // namespace stemma
