// Paged attention in float32 over the work list of attention.h: row after row, 64 keys at a time.
//
// It serves runs that must not depend on neighbours, in float32; it is not tuned as attention.cpp is.
// A row's scores are summed over the dimensions and its values over the keys in ascending order, so
// that nothing depends on the other rows of its item.
#include "attention.h"
#include "kv_format.h"

namespace stemma {
namespace {

constexpr int kGroups = kKeys / 16;
constexpr int kDims = 64;  // of the values summed in registers at a time

struct Row {
    const float* q;
    float* sums;  // [head_dim]
    float largest = -INFINITY, total = 0.0f;
};

// Products of q with 64 keys, packed [head_dim, kKeys].
inline void multiply(const float* q, const float* keys, int dims, Floats (&s)[kGroups]) {
    for (auto& sum : s) sum = zero_floats();
    for (int dim = 0; dim < dims; ++dim) {
        const Floats one = splat(q[dim]);
        for (int g = 0; g < kGroups; ++g)
            s[g] = fmadd(one, load(keys + dim * kKeys + g * 16), s[g]);
    }
}

// sums = sums * decay + probabilities x values of keys [from, to).
void add_values(float* sums, float decay, const float* probs, const float* values,
                const int32_t* slots, int from, int to, int dims) {
    for (int dim = 0; dim < dims; dim += kDims) {
        const int width = std::min(kDims, dims - dim) / 16;
        Floats o[kDims / 16];
        for (int g = 0; g < width; ++g)
            o[g] = splat(decay) * load(sums + dim + g * 16);
        for (int key = from; key < to; ++key) {
            const float* value = values + static_cast<int64_t>(slots[key]) * dims + dim;
            const Floats p = splat(probs[key]);
            for (int g = 0; g < width; ++g)
                o[g] = fmadd(p, load(value + g * 16), o[g]);
        }
        for (int g = 0; g < width; ++g) store(sums + dim + g * 16, o[g]);
    }
}

// One block of keys for a row that sees [from, to) of them, at least one.
void attend(const Attention& a, Row& row, const float* keys, const float* values,
            const int32_t* slots, int from, int to) {
    Floats s[kGroups];
    multiply(row.q, keys, a.head_dim, s);
    const Floats factor = splat(a.softmax_scale() * kLog2E);
    Floats top = splat(-INFINITY);
    for (int g = 0; g < kGroups; ++g) {
        if (a.soft_cap > 0)
            s[g] = splat(a.soft_cap) * tanh(s[g] * splat(a.scale / a.soft_cap));
        const int before = std::clamp(from - g * 16, 0, 16), seen = std::clamp(to - g * 16, 0, 16);
        const auto lanes = static_cast<Mask>((1u << seen) - (1u << before));
        s[g] = select(choice(lanes), s[g], splat(-INFINITY));
        top = max(top, s[g]);
    }
    const float largest = std::max(row.largest, largest_of(top));
    const Floats shift = splat(largest) * factor;
    const auto power = [&](Floats score) __attribute__((always_inline)) {
        return exp2_nonpositive_exactly(fmsub(score, factor, shift));
    };
    alignas(64) float probs[kKeys];
    Floats sum = zero_floats();
    for (int g = 0; g < kGroups; ++g) {
        const Floats p = power(s[g]);
        store(probs + g * 16, p);
        sum = sum + p;
    }
    const float decay = first_of(power(splat(row.largest)));
    row.total = row.total * decay + sum_of(sum);
    row.largest = largest;
    add_values(row.sums, decay, probs, values, slots, from, to, a.head_dim);
}

void run_unit(const Attention& a, const Item& item, int kv_head) {
    thread_local Workspace workspace;
    const int group = a.num_heads / a.num_kv_heads, dims = a.head_dim;
    const int count = item.num_tokens * group;
    workspace.begin(sizeof(float) * dims * (kKeys + count) + 2 * Workspace::kAlignment);
    auto* packed = workspace.take<float>(kKeys * dims);
    auto* sums = workspace.take<float>(count * dims);
    std::memset(sums, 0, sizeof(float) * count * dims);
    std::vector<Row> rows(count);
    for (int row = 0; row < count; ++row) {
        const int64_t token = item.token + row / group;
        rows[row].q = static_cast<const float*>(a.q) + token * a.q_stride +
                      (kv_head * group + row % group) * dims;
        rows[row].sums = sums + row * dims;
    }
    const float* keys = static_cast<const float*>(a.kv) + kv_head * a.num_slots * dims;
    const int32_t* slots = a.slots + item.first_slot;
    const int last_seen = item.num_seen();
    for (int first = 0; first < last_seen; first += kKeys) {
        const int num_keys = std::min(kKeys, last_seen - first);
        // A float is as wide as the pair that is packed there.
        Bf16KV::pack_keys(reinterpret_cast<const bf16*>(keys), slots + first, num_keys, dims * 2,
                          reinterpret_cast<uint32_t*>(packed), [] {});
        for (int row = 0; row < count; ++row) {
            const int from = std::max(0, item.num_hidden + row / group - first);
            const int to = std::min(num_keys, item.num_visible + row / group - first);
            if (from < to) attend(a, rows[row], packed, keys + a.values_at, slots + first, from, to);
        }
    }
    for (int row = 0; row < count; ++row)
        finish_row<float>(a, item, kv_head, row, rows[row].sums, rows[row].largest, rows[row].total);
}

}  // namespace
}  // namespace stemma

using namespace stemma;

extern "C" void stemma_float_attention(const void* plan, const void* q, int64_t q_stride,
                                       const void* kv, const float* scales, const float* sinks,
                                       void* out) {
    const Attention a{*static_cast<const Plan*>(plan), q, q_stride, kv, scales, sinks, out};
    run_plan<float>(a, [&](Unit unit, Unit) { run_unit(a, *unit.item, unit.kv_head); });
}
