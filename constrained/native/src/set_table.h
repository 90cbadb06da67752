// Sets of numbers, each kept once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "automata.h"

namespace stemma {

// Ascending sets, numbered as they come.
class SetTable {
  public:
    explicit SetTable(const Budget& budget) : budget_(&budget), slots_(64, -1) {}

    int32_t size() const { return static_cast<int32_t>(ends_.size()); }
    size_t num_bytes() const {
        return 4 * (words_.capacity() + slots_.capacity()) + 16 * ends_.capacity();
    }
    const int32_t* begin(int32_t set) const { return words_.data() + (set ? ends_[set - 1] : 0); }
    const int32_t* end(int32_t set) const { return words_.data() + ends_[set]; }

    int32_t intern(const std::vector<int32_t>& states) {
        const uint64_t hash = hashed(states.data(), states.data() + states.size());
        size_t slot = hash & (slots_.size() - 1);
        for (; slots_[slot] >= 0; slot = (slot + 1) & (slots_.size() - 1)) {
            const int32_t set = slots_[slot];
            const bool is_same =
                hashes_[set] == hash &&
                std::equal(begin(set), end(set), states.begin(), states.end());
            if (is_same) return set;
        }
        words_.insert(words_.end(), states.begin(), states.end());
        budget_->check_memory(words_.size());
        ends_.push_back(words_.size());
        hashes_.push_back(hash);
        slots_[slot] = size() - 1;
        const int32_t added = size() - 1;
        if (2 * ends_.size() > slots_.size()) grow();
        return added;
    }

  private:
    static uint64_t hashed(const int32_t* first, const int32_t* last) {
        uint64_t hash = 0x9E3779B97F4A7C15u;
        for (; first != last; ++first) {
            hash = (hash ^ static_cast<uint32_t>(*first)) * 0xFF51AFD7ED558CCDu;
            hash ^= hash >> 32;
        }
        return hash;
    }

    void grow() {
        slots_.assign(2 * slots_.size(), -1);
        for (int32_t set = 0; set < size(); ++set) {
            size_t slot = hashes_[set] & (slots_.size() - 1);
            while (slots_[slot] >= 0) slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = set;
        }
    }

    const Budget* budget_;
    std::vector<int32_t> words_, slots_;
    std::vector<size_t> ends_;
    std::vector<uint64_t> hashes_;
};

}  // namespace stemma
