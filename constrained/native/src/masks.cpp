// Token masks of automaton states: a walk of the vocabulary's flat trie over the transition table,
// and, for states inside free text, precomputed masks of all tokens that are plain text.
//
// Source of the walk: Willard & Louf 2023, section 4, with a trie in place of a loop over tokens.
// Layouts are those of constrained/token_masks.py.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int32_t kDead = 0;
constexpr int16_t kUnknown = -1;
constexpr size_t kMaxStates = 256;  // visited for one question; past it, the answer is a lower bound

struct Dfa {
    const uint8_t* class_of;     // [256]
    const int32_t* transitions;  // [num_states, num_classes]
    int64_t num_classes;
    int16_t* runs;  // [num_states]: 2 * (length of free runs) + is_exact, or kUnknown

    int32_t step(int32_t state, int byte) const {
        return transitions[state * num_classes + class_of[byte]];
    }
};

struct Node {
    int32_t end;      // of the subtree
    int32_t first;    // into token_ids
    int32_t edge;     // depth * 256 + byte
    int32_t longest;  // most characters of a token of the subtree
};

struct Trie {
    const Node* nodes;  // [num_nodes + 1], the last one for its `first` only
    const int32_t* token_ids;
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
};

// Allows the tokens of the trie that stay alive from `state`, but for subtrees without a token of
// more than `above` characters.
void walk(const Dfa& dfa, int32_t state, const Trie& trie, int32_t above, uint32_t* out) {
    thread_local std::vector<int32_t> states;
    states.resize(trie.max_depth + 1);
    states[0] = state;
    const int32_t num_nodes = static_cast<int32_t>(trie.num_nodes);
    for (int32_t at = 1; at < num_nodes;) {
        const Node node = trie.nodes[at];
        const int32_t depth = node.edge >> 8;
        const int32_t next =
            node.longest > above ? dfa.step(states[depth - 1], node.edge & 255) : kDead;
        if (next == kDead) {
            at = node.end;
            continue;
        }
        states[depth] = next;
        const int32_t last = trie.nodes[++at].first;
        for (int32_t i = node.first; i < last; i++) {
            const uint32_t token = static_cast<uint32_t>(trie.token_ids[i]);
            out[token >> 5] |= 1u << (token & 31);
        }
    }
}

void add(std::vector<int32_t>& states, int32_t state) {
    for (const int32_t known : states)
        if (known == state) return;
    states.push_back(state);
}

bool has_dead(const std::vector<int32_t>& states) {
    for (const int32_t state : states)
        if (state == kDead) return true;
    return false;
}

std::vector<int32_t> after(const Dfa& dfa, const std::vector<int32_t>& from, int low, int high) {
    std::vector<int32_t> states;
    for (const int32_t state : from)
        for (int byte = low; byte <= high; byte++) add(states, dfa.step(state, byte));
    return states;
}

// The states after one character of plain text: neither a control, nor quote, nor backslash.
std::vector<int32_t> after_character(const Dfa& dfa, int32_t state) {
    struct Lead { int low, high, next_low, next_high, num_more; };  // Unicode 15, table 3-7
    static constexpr Lead kLeads[] = {
        {0xC2, 0xDF, 0x80, 0xBF, 0}, {0xE0, 0xE0, 0xA0, 0xBF, 1}, {0xE1, 0xEC, 0x80, 0xBF, 1},
        {0xED, 0xED, 0x80, 0x9F, 1}, {0xEE, 0xEF, 0x80, 0xBF, 1}, {0xF0, 0xF0, 0x90, 0xBF, 2},
        {0xF1, 0xF3, 0x80, 0xBF, 2}, {0xF4, 0xF4, 0x80, 0x8F, 2},
    };
    std::vector<int32_t> states;
    for (int byte = 0x20; byte < 0x80; byte++) {
        if (byte == '"' || byte == '\\') continue;
        add(states, dfa.step(state, byte));
    }
    for (const Lead& lead : kLeads) {
        std::vector<int32_t> reached = after(dfa, {state}, lead.low, lead.high);
        reached = after(dfa, reached, lead.next_low, lead.next_high);
        for (int i = 0; i < lead.num_more; i++) reached = after(dfa, reached, 0x80, 0xBF);
        for (const int32_t one : reached) add(states, one);
    }
    return states;
}

// How many characters of plain text may follow, whichever they are: the distance to the nearest
// state that refuses one. Exact where no run can be longer.
int16_t runs_from(const Dfa& dfa, int32_t state, int64_t max_run) {
    if (dfa.step(state, ' ') == kDead || dfa.step(state, 'a') == kDead) return 0;  // most states
    std::vector<int32_t> seen{state}, edge{state};
    bool is_chain = true;
    for (int64_t length = 0; length < max_run; length++) {
        std::vector<int32_t> next;
        for (const int32_t from : edge) {
            const std::vector<int32_t> reached = after_character(dfa, from);
            if (has_dead(reached)) {
                const bool is_exact = is_chain && reached.size() == 1;
                return static_cast<int16_t>(2 * length + is_exact);
            }
            is_chain = is_chain && reached.size() == 1;
            for (const int32_t to : reached) {
                const size_t num_seen = seen.size();
                add(seen, to);
                if (seen.size() > num_seen) next.push_back(to);
            }
        }
        if (seen.size() > kMaxStates) return static_cast<int16_t>(2 * length);
        if (next.empty()) break;
        edge.swap(next);
    }
    return static_cast<int16_t>(2 * max_run);
}

}  // namespace

// Sets `out` [num_words] to the tokens that the automaton allows in `state`.
extern "C" void stemma_token_mask(
    const Dfa* dfa, const Tokens* tokens, int32_t state, uint32_t* out) {
    if (dfa->runs[state] == kUnknown) dfa->runs[state] = runs_from(*dfa, state, tokens->max_run);
    const int32_t run = dfa->runs[state] >> 1;
    const bool is_exact = dfa->runs[state] & 1;
    std::memcpy(out, tokens->upto + run * tokens->num_words, tokens->num_words * 4);
    if (run == 0) return walk(*dfa, state, tokens->all, -1, out);
    walk(*dfa, state, tokens->other, -1, out);
    if (!is_exact && run < tokens->max_run) walk(*dfa, state, tokens->plain, run, out);
}
