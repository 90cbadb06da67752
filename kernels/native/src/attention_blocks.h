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

// Asks for keys and their values while others are computed with, some at each step of products, so
// that requests are under way all the time. (Asked for at once they wait for each other, and what
// memory takes adds to what computing takes.) Keys and values of both halves in turns: a core reads
// several streams faster than one. Into the second-level cache: the first is full of the block at
// hand.
class Upcoming {
  public:
    // num_steps: in which to ask for them.
    void begin(int num_steps) {
        half_ = (num_ + 1) / 2;
        next_ = due_ = 0;
        rate_ = ((num_ << kFraction) + num_steps - 1) / num_steps;
    }
    STEMMA_INLINE void ask(int steps = 1) {
        due_ += steps * rate_;
        for (const int end = std::min(num_, due_ >> kFraction); next_ < end; ++next_) {
            const Place place = places_[next_ / 2 + next_ % 2 * half_];
            for (int64_t byte = 0; byte < bytes_; byte += kLineBytes) {
                prefetch(place.key + byte);
                if (to_value_ != 0) prefetch(place.key + to_value_ + byte);
            }
            if (place.scale == nullptr) continue;
            prefetch(place.scale);
            prefetch(place.scale + to_value_scale_);
        }
    }

    void clear() { num_ = 0; }
    // Keys and their values, each `bytes` long; kKeys at most between two calls of `clear`.
    template <class KV>
    void add(const HeadKV<KV>& kv, const int32_t* slots, int count, int64_t bytes) {
        const auto* keys = reinterpret_cast<const char*>(kv.keys);
        bytes_ = bytes;
        to_value_ = reinterpret_cast<const char*>(kv.values) - keys;
        to_value_scale_ = KV::kIsScaled ? kv.value_scales - kv.key_scales : 0;
        int32_t last = -1;
        for (int i = 0; i < count; ++i) {
            const int32_t line = slots[i] / (kLineBytes / 4);
            const bool is_new = KV::kIsScaled && line != last;
            places_[num_++] = {keys + slots[i] * bytes, is_new ? kv.key_scales + slots[i] : nullptr};
            last = line;
        }
    }

  private:
    struct Place {
        const char* key;
        const float* scale;  // null: its line is asked for already
    };
    Place places_[kKeys];
    int64_t bytes_ = 0, to_value_ = 0, to_value_scale_ = 0;  // from a key's to its value's
    int num_ = 0, half_ = 0, next_ = 0;
    static constexpr int kFraction = 16;  // bits of what is due
    int due_ = 0, rate_ = 0;
};

// Asks, while the unit's keys [first, first + num_keys) are computed with, for as many: those one block
// later, of the next unit where this one ends. So as much is asked for in each key's time, however few
// keys a unit's last block has. (A unit of one block asks for the next one's whole first block.)
template <class KV>
void set_upcoming(const Attention& a, Unit unit, Unit next, int first, int num_keys,
                  Upcoming& upcoming) {
    const int64_t bytes = KV::width(a.head_dim) * static_cast<int64_t>(sizeof(typename KV::Number));
    const auto add = [&](Unit of, int from, int to) {
        if (of.item == nullptr) return;
        to = std::min(to, of.item->num_seen());
        if (from < to)
            upcoming.add(HeadKV<KV>(a, of.kv_head), a.slots + of.item->first_slot + from, to - from,
                         bytes);
    };
    upcoming.clear();
    const int end = unit.item->num_seen(), from = first + kKeys, to = from + num_keys;
    add(unit, from, to);
    if (end <= kKeys)
        add(next, 0, kKeys);
    else if (to > end)
        add(next, std::max(from - end, 0), to - end);
}

}  // namespace stemma
