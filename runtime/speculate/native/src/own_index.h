// Where contexts occur in one open text: hash chains, as in LZ77's compressors (RFC 1951, section
// 4), for each order. It reads the text when it is asked, never before.
#pragma once

#include "texts.h"

namespace stemma {

class OwnIndex {
  public:
    // Everything of the text that has a token behind it.
    void read(const Text& text) {
        const int64_t num_tokens = static_cast<int64_t>(text.tokens.size());
        if (num_tokens > static_cast<int64_t>(size_t{1} << bits_)) grow(num_tokens);
        for (; num_read_ < num_tokens; ++num_read_) {
            const ContextHashes hashes(text.begin(), text.begin() + num_read_);
            for (int order = 0; order < kNumOrders; ++order) {
                uint32_t before = kNone;
                if (order >= hashes.first) {
                    uint32_t& head = head_of(hashes.of[order], order);
                    before = head;
                    head = static_cast<uint32_t>(num_read_);
                }
                before_.push_back(before);
            }
        }
    }

    void find(const Text& text, Matches& matches) const {
        const int num_before = matches.num_found;
        for (int order = matches.hashes.first; order < kNumOrders; ++order) {
            if (!matches.allows(order)) continue;
            uint32_t position = heads_[slot_of(matches.hashes.of[order], order)];
            for (int visits = 0; position != kNone && visits < Matches::kMaxVisits; ++visits) {
                matches.take(text, position, kOwn, order);
                if (matches.num_found - num_before == Matches::kMaxFound) return;
                position = before_[position * kNumOrders + order];
            }
            if (matches.num_found > num_before) return;
        }
    }

    int64_t num_bytes() const {
        return static_cast<int64_t>((before_.capacity() + heads_.capacity()) * sizeof(uint32_t));
    }

  private:
    // Read again into tables of twice the size: chains stay short, a token is read twice, amortised.
    void grow(int64_t num_tokens) {
        while (static_cast<int64_t>(size_t{1} << bits_) < num_tokens) ++bits_;
        heads_.assign(kNumOrders << bits_, kNone);
        before_.clear();
        before_.reserve(kNumOrders << bits_);
        num_read_ = 0;
    }

    size_t slot_of(uint64_t hash, int order) const {
        return (static_cast<size_t>(order) << bits_) + (hash >> (64 - bits_));
    }
    uint32_t& head_of(uint64_t hash, int order) { return heads_[slot_of(hash, order)]; }

    int bits_ = 5;
    int64_t num_read_ = 0;
    std::vector<uint32_t> heads_ = std::vector<uint32_t>(kNumOrders << 5, kNone);
    std::vector<uint32_t> before_;  // [num_read, kNumOrders]: the occurrence before, with its hash
};

}  // namespace stemma
