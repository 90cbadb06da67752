// Texts of calls, and how contexts in them are hashed and compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <vector>

namespace stemma {

// A context is looked up by its last so many tokens, the longest order first; what is found is then
// compared further back, up to kMaxMatch.
constexpr int kNumOrders = 3;
constexpr int kOrders[kNumOrders] = {4, 2, 1};
constexpr int kMaxMatch = 32;
constexpr uint32_t kNone = UINT32_MAX;

// Where a match was found, the best witness first.
enum Scope : int32_t { kOwn, kProgram, kOp, kNamespace, kNumScopes };

// Where a call stands; a program or op of 0 is none.
struct Place {
    int64_t name_space, program, op;
};

// One call's text. Invariant: while it is open, `tokens` are its prompt, of `num_prompt` tokens,
// then its output; afterwards a context's length of the prompt at most. `num_entries` of the
// history point to it.
struct Text {
    Place place{};
    std::pmr::vector<int32_t> tokens;
    int64_t num_prompt = 0;
    int64_t num_entries = 0;
    bool is_open = false;
    bool is_used = false;  // else its number is free

    explicit Text(std::pmr::memory_resource* memory) : tokens(memory) {}

    const int32_t* begin() const { return tokens.data(); }
    const int32_t* end() const { return tokens.data() + tokens.size(); }
    int64_t num_output() const { return static_cast<int64_t>(tokens.size()) - num_prompt; }

    int64_t num_bytes() const {
        return static_cast<int64_t>(sizeof(Text) + tokens.capacity() * sizeof(int32_t));
    }

    // What the history does not need goes.
    void trim() {
        const int64_t kept = std::min<int64_t>(num_prompt, kMaxMatch);
        std::pmr::vector<int32_t>(tokens.end() - num_output() - kept, tokens.end(),
                                  tokens.get_allocator())
            .swap(tokens);
        num_prompt = kept;
    }
};

// Hashes of the last kOrders[i] tokens of a context, for the orders from `first` on.
struct ContextHashes {
    uint64_t of[kNumOrders];
    int first = 0;

    ContextHashes() : first(kNumOrders) {}
    ContextHashes(const int32_t* begin, const int32_t* end) {
        uint64_t hash = 0;
        int length = 0;
        for (int order = kNumOrders - 1; order >= 0; --order) {
            if (end - begin < kOrders[order]) {
                first = order + 1;
                return;
            }
            for (; length < kOrders[order]; ++length) hash = mixed(hash, end[-1 - length]);
            of[order] = mixed(hash, order);
        }
    }

    static uint64_t mixed(uint64_t hash, int64_t value) {
        hash = ((hash ^ static_cast<uint64_t>(value)) + 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
        return hash ^ hash >> 32;
    }
};

// How many tokens before `a` and before `b` agree, at most `most`.
inline int common_suffix(const int32_t* a, const int32_t* b, int64_t most) {
    int length = 0;
    while (length < most && a[-1 - length] == b[-1 - length]) ++length;
    return length;
}

// What followed an earlier occurrence of a context's last `length` tokens.
struct Match {
    const int32_t* next;
    const int32_t* end;
    int length;
    Scope scope;
};

// The matches for one context. Of each scope all have been found in one order: the longest with any.
class Matches {
  public:
    static constexpr int kMaxVisits = 48;  // entries that a chain is followed for
    static constexpr int kMaxFound = 16;   // of a scope, the latest

    explicit Matches(int max_match) : max_match_(max_match) {}

    // Forget all: what is to be found is the context from `begin` to `end`.
    void seek(const int32_t* begin, const int32_t* end) {
        begin_ = begin, end_ = end, num_found = 0;
        hashes = ContextHashes(begin, end);
    }

    // Take what follows `position` of a text if the tokens before it match in `order`.
    void take(const Text& text, int64_t position, Scope scope, int order) {
        const int32_t* next = text.begin() + position;
        const int64_t most = std::min<int64_t>({position, end_ - begin_, max_match_});
        const int length = common_suffix(next, end_, most);
        if (length >= kOrders[order]) found[num_found++] = {next, text.end(), length, scope};
    }

    bool allows(int order) const { return kOrders[order] <= max_match_; }

    ContextHashes hashes;
    Match found[kNumScopes * kMaxFound];
    int num_found = 0;

  private:
    const int32_t *begin_ = nullptr, *end_ = nullptr;
    const int max_match_;
};

}  // namespace stemma
