// What the two ways to compute a unit share: its keys and values by blocks, and what of the next block
// is asked for meanwhile.
#pragma once

#include <cmath>

#include "attention.h"
#include "kv_format.h"

namespace stemma {

constexpr int kLineBytes = 64;

// What becomes of scores before the softmax.
struct Scoring {
    float factor;        // turns a kept score into an exponent of 2
    float cap_factor;    // soft_cap > 0: turns a product into what tanh is taken of
    float soft_cap;

    explicit Scoring(const Attention& a)
        : factor(a.softmax_scale() * kLog2E),
          cap_factor(a.soft_cap > 0 ? a.scale / a.soft_cap : 0.0f),
          soft_cap(a.soft_cap) {}
};

// The tokens of an item that see any of its keys [first, first + num_keys): what is before them only
// sees earlier keys, what is after them only later ones.
struct SeeingTokens {
    int begin, end;

    SeeingTokens(const Item& item, int first, int num_keys)
        : begin(std::clamp(first + 1 - item.num_visible, 0, item.num_tokens)),
          end(std::clamp(first + num_keys - item.num_hidden, begin, item.num_tokens)) {}
};

// The keys and values, and their scales, of a KV head.
template <class KV>
struct HeadKV {
    const typename KV::Number *keys, *values;
    const float *key_scales = nullptr, *value_scales = nullptr;

    HeadKV(const Attention& a, int kv_head)
        : keys(static_cast<const typename KV::Number*>(a.kv) +
               kv_head * a.num_slots * KV::width(a.head_dim)),
          values(keys + a.values_at) {
        if (!KV::kIsScaled) return;
        key_scales = a.scales + kv_head * a.num_slots;
        value_scales = key_scales + a.num_kv_heads * a.num_slots;
    }
};

// The scales of some slots, [kKeys]; zero past the last.
inline void pack_scales(const float* scales, const int32_t* slots, int num_keys, float* packed) {
    for (int group = 0; group < num_keys; group += 16) {
        const Mask lanes = lanes_below(num_keys - group);
        store(packed + group, gather(scales, slots + group, lanes));
    }
}

// Asks for a block's keys and values while another is computed with, some at each step of products, so
// that requests are under way all the time. (Asked for at once they wait for each other, and what
// memory takes adds to what computing takes.) Into the second-level cache: the first is full of the
// block at hand.
class Upcoming {
  public:
    // num_steps: in which to ask for them.
    void begin(int num_steps) {
        next_ = 0;
        at_once_ = (num_ + num_steps - 1) / num_steps;
    }
    STEMMA_INLINE void ask(int steps = 1) {
        for (int end = std::min(num_, next_ + steps * at_once_); next_ < end; ++next_)
            for (int line = 0; line < (next_ < num_vectors_ ? num_lines_ : 1); ++line)
                prefetch(places_[next_] + line * kLineBytes);
    }

    void clear() { num_ = num_vectors_ = 0; }
    // Vectors of as many bytes each: a block's keys, or values.
    void add(const void* vectors, const int32_t* slots, int num_slots, int bytes) {
        num_lines_ = (bytes + kLineBytes - 1) / kLineBytes;
        for (int i = 0; i < num_slots; ++i)
            places_[num_ + i] = static_cast<const char*>(vectors) + int64_t{slots[i]} * bytes;
        num_vectors_ = num_ += num_slots;
    }
    // Their scales, behind all vectors.
    void add_scales(const float* scales, const int32_t* slots, int num_slots) {
        int32_t last = -1;
        for (int i = 0; i < num_slots; ++i) {
            const int32_t line = slots[i] / (kLineBytes / 4);
            if (line != last) places_[num_++] = reinterpret_cast<const char*>(scales + slots[i]);
            last = line;
        }
    }

  private:
    static constexpr int kMost = 4 * kKeys;
    const char* places_[kMost];
    int num_ = 0, num_vectors_ = 0, num_lines_ = 0;
    int next_ = 0, at_once_ = 0;
};

// The unit's block of keys that begins with `first`.
template <class KV>
void set_upcoming(const Attention& a, Unit unit, int first, Upcoming& upcoming) {
    upcoming.clear();
    if (unit.item == nullptr) return;
    const HeadKV<KV> kv(a, unit.kv_head);
    const int32_t* slots = a.slots + unit.item->first_slot + first;
    const int num_keys = std::clamp(unit.item->num_seen() - first, 0, kKeys);
    const int bytes = KV::width(a.head_dim) * static_cast<int>(sizeof(typename KV::Number));
    upcoming.add(kv.keys, slots, num_keys, bytes);
    if (a.values_at != 0) upcoming.add(kv.values, slots, num_keys, bytes);
    if (!KV::kIsScaled) return;
    upcoming.add_scales(kv.key_scales, slots, num_keys);
    upcoming.add_scales(kv.value_scales, slots, num_keys);
}

}  // namespace stemma
