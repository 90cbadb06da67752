// Token masks of automaton states: a walk of the vocabulary's flat trie over the transition table,
// and, for states inside free text, precomputed masks of all tokens that are plain text. States in
// which any of many characters may follow again and again (the local part of an address, the rest
// of a bracket) leave out of the walk what consists of those characters alone: a mask of such
// tokens is made once for all states and grammars with the same characters.
//
// Source of the walk: Willard & Louf 2023, section 4, with a trie in place of a loop over tokens.
// Layouts are those of constrained/token_masks.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "table.h"

namespace {

using stemma::kDead;
using Dfa = stemma::Table;
constexpr int16_t kUnknown = -1, kNotFree = -2, kMostlyFree = -3;  // of `runs`
constexpr size_t kMaxStates = 256;  // visited for one question; past it, the answer is a lower bound
constexpr int kFewestBytes = 16;  // of a run: fewer are quickly walked
constexpr int64_t kShortestRun = 2;
constexpr int64_t kLongRun = 12;  // nearly all tokens are shorter
constexpr int kFewMissing = 4;
constexpr int kMaxAttempts = 64;

struct Node {
    int32_t end;      // of the subtree
    int32_t first;    // into token_ids
    int32_t edge;     // depth * 256 + byte
    int32_t longest;  // most characters (in `all`: bytes) of a token of the subtree
};

// ASCII characters; bit 127 stands for DEL and for all bytes that are not ASCII.
struct ByteSet {
    uint64_t words[2];

    void add(int byte) {
        const int bit = byte < 127 ? byte : 127;
        words[bit >> 6] |= uint64_t{1} << (bit & 63);
    }
    void remove(int byte) { words[byte >> 6] &= ~(uint64_t{1} << (byte & 63)); }
    bool has(int byte) const {
        const int bit = byte < 127 ? byte : 127;
        return words[bit >> 6] >> (bit & 63) & 1;
    }
    int size() const {
        return __builtin_popcountll(words[0]) + __builtin_popcountll(words[1]);
    }
    ByteSet without(const ByteSet& other) const {
        return {{words[0] & ~other.words[0], words[1] & ~other.words[1]}};
    }
    bool is_within(const ByteSet& other) const { return without(other).size() == 0; }
};

// At most `length` bytes of a set: all such texts may follow in a state.
struct Run {
    ByteSet bytes;
    int64_t length;
};

struct Trie {
    const Node* nodes;  // [num_nodes + 1], the last one for its `first` only
    const int32_t* token_ids;
    const int32_t* roots;  // [256]: the node of each first byte, 0 where there is none
    int64_t num_nodes;
    int64_t max_depth;
};

struct Tokens {
    Trie all;
    Trie other;             // not plain text
    Trie plain;             // plain text
    const uint32_t* upto;   // [max_run + 1, num_words]: plain tokens of at most so many characters
    int64_t max_run;
    int64_t num_words;
    const ByteSet* below;  // [num_nodes of all]: bytes of the node and its subtree
};

// Allows the tokens that end at a node.
inline void allow(const Trie& trie, int32_t node, uint32_t* out) {
    for (int32_t i = trie.nodes[node].first, last = trie.nodes[node + 1].first; i < last; i++) {
        const uint32_t token = static_cast<uint32_t>(trie.token_ids[i]);
        out[token >> 5] |= 1u << (token & 31);
    }
}

// Allows the tokens of the trie that stay alive from `state`, but for subtrees without a token of
// more than `above` characters.
void walk(const Dfa& dfa, int32_t state, const Trie& trie, int32_t above, uint32_t* out) {
    thread_local std::vector<int32_t> states;
    states.resize(trie.max_depth + 1);
    states[0] = state;
    for (int byte = 0; byte < 256; byte++) {  // not the nodes: they are far apart in memory
        const int32_t root = trie.roots[byte];
        if (root == 0 || dfa.step(state, byte) == kDead) continue;
        for (int32_t at = root, end = trie.nodes[root].end; at < end;) {
            const Node node = trie.nodes[at];
            const int32_t depth = node.edge >> 8;
            const int32_t next =
                node.longest > above ? dfa.step(states[depth - 1], node.edge & 255) : kDead;
            if (next == kDead) {
                at = node.end;
                continue;
            }
            states[depth] = next;
            allow(trie, at++, out);
        }
    }
}

// As `walk` of all tokens, but for those that `run` holds, which `out` has already.
void walk_beyond(
    const Dfa& dfa, int32_t state, const Tokens& tokens, const Run& run, uint32_t* out) {
    thread_local std::vector<int32_t> states;
    const Trie& trie = tokens.all;
    states.resize(trie.max_depth + 1);
    states[0] = state;
    for (int byte = 0; byte < 256; byte++) {
        const int32_t root = trie.roots[byte];
        if (root == 0 || dfa.step(state, byte) == kDead) continue;
        int32_t within = 0;  // depth down to which the path is of the run's bytes
        for (int32_t at = root, end = trie.nodes[root].end; at < end;) {
            const Node node = trie.nodes[at];
            const int32_t depth = node.edge >> 8;
            if (depth <= within) within = depth - 1;
            if (within == depth - 1 && run.bytes.has(node.edge & 255)) {
                if (node.longest <= run.length && tokens.below[at].is_within(run.bytes)) {
                    at = node.end;
                    continue;
                }
                within = depth;
            }
            const int32_t next = dfa.step(states[depth - 1], node.edge & 255);
            if (next == kDead) {
                at = node.end;
                continue;
            }
            states[depth] = next;
            allow(trie, at++, out);
        }
    }
}

// States in the order in which they were added, each once. Mostly there are few.
class States {
  public:
    bool add(int32_t state) {
        if (slots_.empty() ? std::find(begin(), end(), state) != end() : !claim(state)) return false;
        states_.push_back(state);
        if (states_.size() >= kFew && 2 * states_.size() > slots_.size()) grow();
        return true;
    }
    size_t size() const { return states_.size(); }
    std::vector<int32_t>::const_iterator begin() const { return states_.begin(); }
    std::vector<int32_t>::const_iterator end() const { return states_.end(); }

  private:
    static constexpr size_t kFew = 16;

    // A slot for the state, unless it has one.
    bool claim(int32_t state) {
        const size_t mask = slots_.size() - 1;
        size_t slot = (static_cast<uint32_t>(state) * 0x9E3779B1u >> 8) & mask;
        for (; slots_[slot] >= 0; slot = (slot + 1) & mask)
            if (slots_[slot] == state) return false;
        slots_[slot] = state;
        return true;
    }

    void grow() {
        slots_.assign(slots_.empty() ? 4 * kFew : 2 * slots_.size(), -1);
        for (const int32_t state : states_) claim(state);
    }

    std::vector<int32_t> states_, slots_;  // the latter a power of two, once there are more than few
};

bool has_dead(const States& states) {
    for (const int32_t state : states)
        if (state == kDead) return true;
    return false;
}

States after(const Dfa& dfa, const States& from, int low, int high) {
    States states;
    for (const int32_t state : from)
        for (int byte = low; byte <= high; byte++) states.add(dfa.step(state, byte));
    return states;
}

bool is_plain(int byte) { return byte != '"' && byte != '\\'; }  // of ASCII from 0x20 on

// The states after one character of plain text: neither a control, nor quote, nor backslash.
States after_character(const Dfa& dfa, int32_t state) {
    struct Lead { int low, high, next_low, next_high, num_more; };  // Unicode 15, table 3-7
    static constexpr Lead kLeads[] = {
        {0xC2, 0xDF, 0x80, 0xBF, 0}, {0xE0, 0xE0, 0xA0, 0xBF, 1}, {0xE1, 0xEC, 0x80, 0xBF, 1},
        {0xED, 0xED, 0x80, 0x9F, 1}, {0xEE, 0xEF, 0x80, 0xBF, 1}, {0xF0, 0xF0, 0x90, 0xBF, 2},
        {0xF1, 0xF3, 0x80, 0xBF, 2}, {0xF4, 0xF4, 0x80, 0x8F, 2},
    };
    States states, self;
    self.add(state);
    for (int byte = 0x20; byte < 0x80; byte++)
        if (is_plain(byte)) states.add(dfa.step(state, byte));
    for (const Lead& lead : kLeads) {
        States reached = after(dfa, self, lead.low, lead.high);
        reached = after(dfa, reached, lead.next_low, lead.next_high);
        for (int i = 0; i < lead.num_more; i++) reached = after(dfa, reached, 0x80, 0xBF);
        for (const int32_t one : reached) states.add(one);
    }
    return states;
}

// How many characters of plain text may follow, whichever they are: the distance to the nearest
// state that refuses one. Exact where no run can be longer.
int16_t runs_from(const Dfa& dfa, int32_t state, int64_t max_run) {
    if (dfa.step(state, ' ') == kDead || dfa.step(state, 'a') == kDead) return 0;  // most states
    States seen;
    seen.add(state);
    std::vector<int32_t> edge{state};
    bool is_chain = true;
    for (int64_t length = 0; length < max_run; length++) {
        std::vector<int32_t> next;
        for (const int32_t from : edge) {
            const States reached = after_character(dfa, from);
            if (has_dead(reached)) {
                const bool is_exact = is_chain && reached.size() == 1;
                return static_cast<int16_t>(2 * length + is_exact);
            }
            is_chain = is_chain && reached.size() == 1;
            for (const int32_t to : reached)
                if (seen.add(to)) next.push_back(to);
        }
        if (seen.size() > kMaxStates) return static_cast<int16_t>(2 * length);
        if (next.empty()) break;
        edge.swap(next);
    }
    return static_cast<int16_t>(2 * max_run);
}

bool leads_to_itself(const Dfa& dfa, int32_t state) {
    for (int byte = 0x20; byte < 0x80; byte++)
        if (is_plain(byte) && dfa.step(state, byte) != state) return false;
    const States reached = after_character(dfa, state);
    return reached.size() == 1 && *reached.begin() == state;
}

// Whether all tokens of plain text may follow, as far as that is known or soon found.
bool is_free(const Dfa& dfa, int32_t state, int64_t max_run) {
    if (dfa.runs[state] == kUnknown) {
        const bool is_loop = leads_to_itself(dfa, state);  // may move dfa->runs
        dfa.runs[state] = is_loop ? static_cast<int16_t>(2 * max_run) : kNotFree;
    }
    return dfa.runs[state] >= 2 * max_run;
}

// Whether most characters lead to free states: as where a few of all texts are excluded.
bool is_mostly_free(const Dfa& dfa, int32_t state, int64_t max_run) {
    int num_free = 0, num_other = 0;
    for (int byte = 0x20; byte < 0x80; byte++) {
        if (!is_plain(byte)) continue;
        const int32_t to = dfa.step(state, byte);
        (to != kDead && is_free(dfa, to, max_run) ? num_free : num_other)++;
        if (num_other > 0x30) return false;
    }
    return num_free > num_other;
}

// Removes from `out`, which has all tokens of the trie of plain text, those that may not follow.
void walk_clearing(
    const Dfa& dfa, int32_t state, const Trie& trie, int64_t max_run, uint32_t* out) {
    thread_local std::vector<int32_t> states;
    states.resize(trie.max_depth + 1);
    states[0] = state;
    for (int32_t at = 1; at < trie.num_nodes;) {
        const Node node = trie.nodes[at];
        const int32_t depth = node.edge >> 8;
        const int32_t next = dfa.step(states[depth - 1], node.edge & 255);
        if (next != kDead && !is_free(dfa, next, max_run)) {
            states[depth] = next;
            at++;
            continue;
        }
        for (int32_t i = node.first, last = trie.nodes[node.end].first; next == kDead && i < last; i++) {
            const uint32_t token = static_cast<uint32_t>(trie.token_ids[i]);
            out[token >> 5] &= ~(1u << (token & 31));
        }
        at = node.end;
    }
}

// ASCII characters that may follow in a state.
ByteSet alive_in(const Dfa& dfa, int32_t state) {
    ByteSet alive{};
    for (int byte = 0; byte < 127; byte++)
        if (dfa.step(state, byte) != kDead) alive.add(byte);
    return alive;
}

// A reached state in which some bytes of a run are missing, and the byte that led there.
struct Gap {
    ByteSet missing;
    int byte;
    int64_t length;  // of the texts before it; all of the run's bytes may follow these
};

// The nearest gap in the texts of `bytes`; without missing bytes and of length `most` where there is
// none before, or as long as the search went.
Gap nearest_gap(const Dfa& dfa, int32_t state, const ByteSet& bytes, int64_t most) {
    States seen;
    seen.add(state);
    std::vector<int32_t> edge{state};
    for (int64_t length = 1; length < most; length++) {
        std::vector<int32_t> next;
        for (const int32_t from : edge) {
            for (int byte = 0; byte < 127; byte++) {
                if (!bytes.has(byte)) continue;
                const int32_t to = dfa.step(from, byte);
                if (!seen.add(to)) continue;
                const ByteSet missing = bytes.without(alive_in(dfa, to));
                if (missing.size() > 0) return {missing, byte, length};
                next.push_back(to);
            }
        }
        if (next.empty()) break;
        if (seen.size() > kMaxStates) return {{}, 0, length};
        edge.swap(next);
    }
    return {{}, 0, most};
}

// Characters that follow each other freely from `state` on. A greedy search: where a few are missing
// after some text they go, where many are missing the one that led there goes. A gap far away, or
// one where all are missing (a count is used up), ends the run instead.
Run run_of(const Dfa& dfa, int32_t state, const Tokens& tokens) {
    Run run{alive_in(dfa, state), 0};
    for (int attempt = 0; attempt < kMaxAttempts && run.bytes.size() >= kFewestBytes; attempt++) {
        const Gap gap = nearest_gap(dfa, state, run.bytes, tokens.all.max_depth);
        const int num_missing = gap.missing.size();
        const bool is_end = gap.length >= kShortestRun && num_missing == run.bytes.size();
        if (is_end || num_missing == 0 || gap.length >= kLongRun) {
            run.length = gap.length;
            return run;
        }
        if (num_missing <= kFewMissing)
            run.bytes = run.bytes.without(gap.missing);
        else
            run.bytes.remove(gap.byte);
    }
    return run;
}

}  // namespace

// Sets `longest` of each node (bytes of the subtree's longest token) and `below`.
extern "C" void stemma_note_subtrees(Node* nodes, int64_t num_nodes, ByteSet* below) {
    int32_t max_depth = 0;
    for (int64_t at = 0; at < num_nodes; at++)
        max_depth = nodes[at].edge >> 8 > max_depth ? nodes[at].edge >> 8 : max_depth;
    std::vector<ByteSet> bytes(max_depth + 2);  // of the children met so far, by their depth
    std::vector<int32_t> longest(max_depth + 2, 0);
    for (int64_t at = num_nodes - 1; at >= 0; at--) {
        const int32_t depth = nodes[at].edge >> 8;
        ByteSet own = bytes[depth + 1];
        if (depth > 0) own.add(nodes[at].edge & 255);
        const int32_t most = longest[depth + 1] > 0 ? longest[depth + 1] : depth;
        bytes[depth + 1] = ByteSet{};
        longest[depth + 1] = 0;
        below[at] = own;
        nodes[at].longest = most;
        for (int i = 0; i < 2; i++) bytes[depth].words[i] |= own.words[i];
        longest[depth] = most > longest[depth] ? most : longest[depth];
    }
}

// Sets `out` to the tokens that `run` holds.
extern "C" void stemma_mask_of_run(const Tokens* tokens, const Run* run, uint32_t* out) {
    const Trie& trie = tokens->all;
    std::memset(out, 0, tokens->num_words * 4);
    for (int32_t at = 1; at < trie.num_nodes;) {
        const Node node = trie.nodes[at];
        if (node.edge >> 8 > run->length || !run->bytes.has(node.edge & 255)) {
            at = node.end;
            continue;
        }
        if (node.longest <= run->length && tokens->below[at].is_within(run->bytes)) {
            for (int32_t i = node.first, last = trie.nodes[node.end].first; i < last; i++) {
                const uint32_t token = static_cast<uint32_t>(trie.token_ids[i]);
                out[token >> 5] |= 1u << (token & 31);
            }
            at = node.end;
            continue;
        }
        allow(trie, at++, out);
    }
}

// As `stemma_token_mask`, for a state with a run, whose mask is given.
extern "C" void stemma_token_mask_beyond(
    const Dfa* dfa, const Tokens* tokens, int32_t state, const Run* run, const uint32_t* of_run,
    uint32_t* out) {
    std::memcpy(out, of_run, tokens->num_words * 4);
    walk_beyond(*dfa, state, *tokens, *run, out);
}

// Sets `out` [num_words] to the tokens that the automaton allows in `state` and returns 0; or, where
// `stemma_token_mask_beyond` does it in less time, sets `found` and returns 1.
extern "C" int64_t stemma_token_mask(
    const Dfa* dfa, const Tokens* tokens, int32_t state, Run* found, uint32_t* out) {
    if (dfa->lazy != nullptr) begin_call(*dfa->lazy);
    if (!is_free(*dfa, state, tokens->max_run) && dfa->runs[state] == kNotFree) {
        int16_t found_run = kMostlyFree;  // what finds it may move dfa->runs
        if (!is_mostly_free(*dfa, state, tokens->max_run))
            found_run = runs_from(*dfa, state, tokens->max_run);
        dfa->runs[state] = found_run;
    }
    if (dfa->runs[state] == kMostlyFree) {
        std::memcpy(out, tokens->upto + tokens->max_run * tokens->num_words, tokens->num_words * 4);
        walk(*dfa, state, tokens->other, -1, out);
        walk_clearing(*dfa, state, tokens->plain, tokens->max_run, out);
        return 0;
    }
    const int32_t run = dfa->runs[state] >> 1;
    const bool is_exact = dfa->runs[state] & 1;
    if (run < kLongRun && !is_exact) {
        *found = run_of(*dfa, state, *tokens);
        if (found->length > run) return 1;
    }
    if (run == 0) {
        std::memset(out, 0, tokens->num_words * 4);
        walk(*dfa, state, tokens->all, -1, out);
        return 0;
    }
    std::memcpy(out, tokens->upto + run * tokens->num_words, tokens->num_words * 4);
    walk(*dfa, state, tokens->other, -1, out);
    if (!is_exact && run < tokens->max_run) walk(*dfa, state, tokens->plain, run, out);
    return 0;
}

// Sets the bits of `out` [32] for the bytes that may follow in `state`.
extern "C" void stemma_next_bytes(const Dfa* dfa, int32_t state, uint8_t* out) {
    if (dfa->lazy != nullptr) begin_call(*dfa->lazy);
    std::memset(out, 0, 32);
    for (int byte = 0; byte < 256; byte++)
        if (dfa->step(state, byte) != kDead) out[byte >> 3] |= 1 << (byte & 7);
}

// The tokens among `ids` that `allowed` has and `without` (where given) has not: their number, and
// their ids in `out`. Without `out`, whether there is one.
extern "C" int64_t stemma_tokens_among(
    const int32_t* ids, int64_t num_ids, const uint32_t* allowed, const uint32_t* without,
    int32_t* out) {
    int64_t num_found = 0;
    for (int64_t i = 0; i < num_ids; i++) {
        const uint32_t token = static_cast<uint32_t>(ids[i]);
        uint32_t word = allowed[token >> 5];
        if (without != nullptr) word &= ~without[token >> 5];
        if ((word >> (token & 31) & 1) == 0) continue;
        if (out == nullptr) return 1;
        out[num_found++] = ids[i];
    }
    return num_found;
}
