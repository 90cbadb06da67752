// Thompson's construction over bytes. A rule is built once for each state that follows it, so that
// a reference at a rule's end is a jump.
#include <algorithm>
#include <map>

#include "automata.h"

namespace stemma {
namespace {

constexpr int32_t kMaxOperandDepth = 100;
constexpr int32_t kSmallClass = 8;  // ranges; a larger class is made deterministic once
constexpr int32_t kAnyText[] = {0, 0xD7FF, 0xE000, 0x10FFFF};
constexpr int32_t kAnyTextKey = -1;

struct ByteRange {
    uint8_t low, high;
    bool operator<(const ByteRange& other) const {
        return low != other.low ? low < other.low : high < other.high;
    }
};
using ByteRanges = std::vector<ByteRange>;

int32_t encoded(int32_t code, uint8_t* bytes) {
    if (code <= 0x7F) return bytes[0] = static_cast<uint8_t>(code), 1;
    const int32_t size = code <= 0x7FF ? 2 : code <= 0xFFFF ? 3 : 4;
    for (int32_t i = size - 1; i > 0; --i, code >>= 6) bytes[i] = 0x80 | (code & 0x3F);
    bytes[0] = static_cast<uint8_t>((0xF00 >> size) | code);
    return size;
}

// Where to cut [low, high] so that equal lengths and whole continuation ranges remain.
int32_t end_of_first_product(int32_t low, int32_t high) {
    for (const int32_t last : {0x7F, 0x7FF, 0xFFFF})
        if (low <= last && last < high) return last;
    if (high <= 0x7F) return high;
    for (const int32_t bits : {6, 12, 18}) {
        const int32_t tail = (1 << bits) - 1;
        if (low >> bits == high >> bits) continue;
        if (low & tail) return low | tail;
        if ((high & tail) != tail) return (high & ~tail) - 1;
    }
    return high;
}

// Adds [low, high] as sequences, the suffixes of which are shared through `tails`.
void add_range(
    int32_t low, int32_t high, ByteEdges& found, std::map<ByteRanges, int32_t>& tails
) {
    while (low <= high) {
        int32_t last = end_of_first_product(low, high);
        for (int32_t cut; (cut = end_of_first_product(low, last)) < last;) last = cut;
        uint8_t first_bytes[4], last_bytes[4];
        const int32_t size = encoded(low, first_bytes);
        encoded(last, last_bytes);
        int32_t after = ByteEdges::kExit;
        ByteRanges tail;
        for (int32_t i = size - 1; i > 0; --i) {
            tail.insert(tail.begin(), {first_bytes[i], last_bytes[i]});
            const auto [known, is_new] = tails.try_emplace(tail, found.num_inner);
            if (is_new) {
                found.edges.push_back({found.num_inner++, after, first_bytes[i], last_bytes[i]});
            }
            after = known->second;
        }
        found.edges.push_back({ByteEdges::kEntry, after, first_bytes[0], last_bytes[0]});
        low = last + 1;
    }
}

void add_byte_edges(const ByteEdges& template_, int32_t entry, int32_t exit, Nfa& nfa,
                    const Budget& budget) {
    const auto first = static_cast<int32_t>(nfa.first_edge.size());
    for (int32_t i = 0; i < template_.num_inner; ++i) nfa.new_state(budget);
    const auto state = [&](int32_t local) {
        return local >= 0 ? first + local : local == ByteEdges::kEntry ? entry : exit;
    };
    for (const auto& edge : template_.edges)
        nfa.add_edge(state(edge.from), edge.low, edge.high, state(edge.to));
}

void add_automaton(const Dfa& dfa, int32_t entry, int32_t exit, Nfa& nfa, const Budget& budget) {
    if (dfa.start == kDead) return;
    const auto first = static_cast<int32_t>(nfa.first_edge.size()) - 1;
    for (int32_t state = 1; state < dfa.num_states(); ++state) nfa.new_state(budget);
    for (int32_t state = 1; state < dfa.num_states(); ++state) {
        const int32_t* row = dfa.row(state);
        for (int32_t byte = 0; byte < 256;) {
            const int32_t low = byte, to = row[dfa.class_of[byte]];
            while (byte < 256 && row[dfa.class_of[byte]] == to) ++byte;
            if (to == kDead) continue;
            nfa.add_edge(first + state, static_cast<uint8_t>(low), static_cast<uint8_t>(byte - 1),
                         first + to);
        }
        if (dfa.accepting[state]) nfa.add_move(first + state, exit);
    }
    nfa.add_move(entry, first + dfa.start);
}

}  // namespace

ByteEdges byte_edges(const int32_t* ranges, int32_t num_ranges) {
    ByteEdges found;
    std::map<ByteRanges, int32_t> tails;
    for (int32_t i = 0; i < num_ranges; ++i)
        add_range(ranges[2 * i], ranges[2 * i + 1], found, tails);
    return found;
}

// One NFA in the making; a list of work instead of recursion.
class Thompson {
  public:
    Thompson(Construction& whole, const std::vector<int32_t>& open_rules, int32_t depth)
        : whole_(whole), table_(whole.table_), budget_(whole.budget_), open_rules_(open_rules),
          depth_(depth) {}

    Nfa run(int32_t root) {
        nfa_.new_state(budget_);
        nfa_.new_state(budget_);
        pending_.push_back({root, kStart, kAccept, kNone});
        for (size_t num_done = 1; !pending_.empty(); ++num_done) {
            budget_.check_nfa(num_done);  // shared parts may multiply without new states
            const Work work = pending_.back();
            pending_.pop_back();
            add(work);
        }
        return std::move(nfa_);
    }

  private:
    static constexpr int32_t kNone = -1;
    struct Work {
        int32_t node, entry, exit, within;  // `within`: the innermost open rule
    };
    struct OpenRule {
        int32_t rule, exit, outer;
    };

    void add(const Work& work) {
        const auto& node = table_.nodes[work.node];
        const int32_t* items = table_.payload + node.a;
        switch (node.kind) {
            case Kind::literal: return add_literal(items, node.b, work.entry, work.exit);
            case Kind::chars:
                if (node.b > kSmallClass)
                    return add_automaton(whole_.large_class(work.node), work.entry, work.exit, nfa_,
                                         budget_);
                return add_byte_edges(whole_.small_class(work.node), work.entry, work.exit, nfa_,
                                      budget_);
            case Kind::concat: return add_concat(items, node.b, work);
            case Kind::alt:
                for (int32_t i = 0; i < node.b; ++i)
                    pending_.push_back({items[i], work.entry, work.exit, work.within});
                return;
            case Kind::repeat: return add_repeat(node, work);
            case Kind::ref: return add_rule(node.a, work);
            case Kind::conjunction:
            case Kind::negation:
                return add_automaton(whole_.operation(work.node, open_within(work.within), depth_),
                                     work.entry, work.exit, nfa_, budget_);
        }
    }

    void add_literal(const int32_t* bytes, int32_t size, int32_t entry, int32_t exit) {
        if (size == 0) return nfa_.add_move(entry, exit);
        for (int32_t i = 0; i < size; ++i) {
            const int32_t to = i == size - 1 ? exit : nfa_.new_state(budget_);
            const auto byte = static_cast<uint8_t>(bytes[i]);
            nfa_.add_edge(entry, byte, byte, to);
            entry = to;
        }
    }

    void add_concat(const int32_t* parts, int32_t size, const Work& work) {
        if (size == 0) return nfa_.add_move(work.entry, work.exit);
        int32_t entry = work.entry;
        for (int32_t i = 0; i < size; ++i) {
            const int32_t exit = i == size - 1 ? work.exit : nfa_.new_state(budget_);
            pending_.push_back({parts[i], entry, exit, work.within});
            entry = exit;
        }
    }

    void add_repeat(const GrammarTable::Node& node, const Work& work) {
        int32_t state = work.entry;
        for (int32_t i = 0; i < node.b; ++i) state = add_turn(node.a, state, work.within);
        if (node.c == -1) {
            const int32_t loop = nfa_.new_state(budget_);
            nfa_.add_move(state, loop);
            pending_.push_back({node.a, loop, loop, work.within});
            state = loop;
        } else {
            for (int32_t i = node.b; i < node.c; ++i) {
                nfa_.add_move(state, work.exit);
                state = add_turn(node.a, state, work.within);
            }
        }
        nfa_.add_move(state, work.exit);
    }

    int32_t add_turn(int32_t part, int32_t entry, int32_t within) {
        const int32_t after = nfa_.new_state(budget_);
        pending_.push_back({part, entry, after, within});
        return after;
    }

    void add_rule(int32_t rule, const Work& work) {
        if (table_.rule_roots[rule] == -1) throw Failure{Code::unknown_rule, rule};
        for (const int32_t open : open_rules_)
            if (open == rule) throw Failure{Code::not_regular, rule};
        for (int32_t at = work.within; at != kNone; at = frames_[at].outer)
            if (frames_[at].rule == rule && frames_[at].exit != work.exit)
                throw Failure{Code::not_regular, rule};
        const auto key = static_cast<uint64_t>(rule) << 32 | static_cast<uint32_t>(work.exit);
        const auto [known, is_new] = of_rule_.try_emplace(key, 0);
        if (is_new) {
            known->second = nfa_.new_state(budget_);
            frames_.push_back({rule, work.exit, work.within});
            pending_.push_back({table_.rule_roots[rule], known->second, work.exit,
                                static_cast<int32_t>(frames_.size()) - 1});
        }
        nfa_.add_move(work.entry, known->second);
    }

    // The rules that an operand may not refer to.
    std::vector<int32_t> open_within(int32_t within) const {
        std::vector<int32_t> rules = open_rules_;
        for (int32_t at = within; at != kNone; at = frames_[at].outer)
            rules.push_back(frames_[at].rule);
        return rules;
    }

    Construction& whole_;
    const GrammarTable& table_;
    const Budget& budget_;
    const std::vector<int32_t>& open_rules_;
    const int32_t depth_;
    Nfa nfa_;
    std::vector<Work> pending_;
    std::vector<OpenRule> frames_;
    std::unordered_map<uint64_t, int32_t> of_rule_;
};

Dfa Construction::determinised(int32_t node, std::vector<int32_t> open_rules, int32_t depth) {
    if (depth > kMaxOperandDepth) throw Failure{Code::nesting};
    budget_.check_time();
    return minimal(subsets(Thompson(*this, open_rules, depth).run(node), budget_), budget_);
}

const Dfa& Construction::operation(
    int32_t index, const std::vector<int32_t>& open_rules, int32_t depth
) {
    const auto known = automata_.find(index);
    if (known != automata_.end()) return known->second;
    const auto& node = table_.nodes[index];
    if (node.kind == Kind::negation) {
        const Dfa part = determinised(node.a, open_rules, depth + 1);
        Dfa others = minimal(product(any_text(), part, true, budget_), budget_);
        return automata_[index] = std::move(others);
    }
    if (node.b == 0) return any_text();
    Dfa result = determinised(table_.items(node)[0], open_rules, depth + 1);
    for (int32_t i = 1; i < node.b; ++i) {
        const Dfa part = determinised(table_.items(node)[i], open_rules, depth + 1);
        result = minimal(product(result, part, false, budget_), budget_);
    }
    return automata_[index] = std::move(result);
}

const Dfa& Construction::any_text() {
    const auto known = automata_.find(kAnyTextKey);
    if (known != automata_.end()) return known->second;
    Nfa nfa;
    nfa.new_state(budget_);
    nfa.new_state(budget_);
    add_byte_edges(byte_edges(kAnyText, 2), kStart, kStart, nfa, budget_);
    nfa.add_move(kStart, kAccept);
    return automata_[kAnyTextKey] = minimal(subsets(nfa, budget_), budget_);
}

const Dfa& Construction::large_class(int32_t index) {
    const auto known = automata_.find(index);
    if (known != automata_.end()) return known->second;
    const auto& node = table_.nodes[index];
    Nfa nfa;
    nfa.new_state(budget_);
    nfa.new_state(budget_);
    add_byte_edges(byte_edges(table_.items(node), node.b), kStart, kAccept, nfa, budget_);
    return automata_[index] = minimal(subsets(nfa, budget_), budget_);
}

const ByteEdges& Construction::small_class(int32_t index) {
    const auto [known, is_new] = classes_.try_emplace(index);
    const auto& node = table_.nodes[index];
    if (is_new) known->second = byte_edges(table_.items(node), node.b);
    return known->second;
}

}  // namespace stemma
