// Grammars as automata whose states are made when an output first reaches them, recursive ones too.
//
// A continuation is what is left of one expression, and of all that it stands in: a list whose
// equal ends are shared, so that a rule at the end of a rule adds nothing to it. A state is a set of
// continuations, one for each way to read the text so far; its transitions are found when they are
// first asked for. Continuations of the same expression before different ends become one with all
// of these ends (as in a graph-structured stack: Tomita, "An Efficient Augmented-Context-Free
// Parsing Algorithm", 1987), so that a state has no more of them than the grammar has places. And and Not are small
// automata of their own (thompson.cpp). No state is dead: every expression that is entered matches
// something, which is checked once.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "set_table.h"
#include "table.h"

namespace stemma {
namespace {

constexpr int32_t kSmallClass = 8;  // ranges, as in thompson.cpp
constexpr int32_t kEndNode = -1, kJoinNode = -2;
constexpr int32_t kEndOfText = 0;  // a continuation
constexpr int32_t kMaxJoined = 500;  // levels: each is a call
constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr int64_t kMaxWork = 20'000'000;  // steps of one call: about 0.1 s

}  // namespace

class Lazy {
  public:
    Lazy(const int32_t* words, int64_t num_words, const Budget& budget)
        : words_(words, words + num_words), grammar_(words_.data(), num_words), budget_(budget),
          construction_(grammar_, budget_), states_(endless_), joins_(endless_) {
        find_nullable();
        find_productive();
        set_classes();
        slots_.assign(256, -1);
        continuation(kEndNode, 0, 0);
        states_.intern({});
        add_row();
        if (is_productive_[grammar_.start]) start_ = state_of(entered(grammar_.start, kEndOfText));
        budget_.ends_at = 1e300;  // what And and Not need is there, or small
    }

    Table table{};

    int32_t start() const { return start_; }
    int32_t num_states() const { return states_.size(); }
    void begin() { work_ = 0; }

    size_t num_bytes() const {
        return 4 * (transitions_.capacity() + words_.capacity() + slots_.capacity()) +
               16 * continuations_.capacity() + states_.num_bytes() + joins_.num_bytes() +
               3 * runs_.capacity();
    }

    bool accepts(int32_t state) {
        if (transitions_[static_cast<size_t>(state) * num_classes_] < 0) fill(state);
        return is_accepting_[state] != 0;
    }

    // The only byte that may follow; -1: none may, -2: several.
    int32_t exit(int32_t state) {
        int32_t found = -1;
        for (int32_t byte = 0; byte < 256; ++byte) {
            if (table.step(state, byte) == kDead) continue;
            if (found >= 0) return -2;
            found = byte;
        }
        return found;
    }

    void fill(int32_t state) {
        const size_t row = static_cast<size_t>(state) * num_classes_;
        std::fill_n(transitions_.begin() + static_cast<int64_t>(row), num_classes_, kDead);
        if (table.has_failed) return;
        try {
            close(state);
            join_equal(leaves_, kMaxJoined);
            edges_.clear();
            for (const int32_t one : leaves_) add_edges(one);
            fill_classes(row);
        } catch (const Failure&) {
            table.has_failed = 1;
        } catch (const std::bad_alloc&) {
            table.has_failed = 1;
        }
        if (num_bytes() > kMaxBytes) table.has_failed = 1;
    }

  private:
    // The rest of `node` from `at` on, and then `next`. `at` is a byte of a literal, a part of a
    // sequence, the repetitions so far, or a state of a class or of an operation.
    struct Continuation {
        int32_t node, at, next;
    };
    struct Edge {
        int32_t low, high, to;  // classes, a continuation
    };

    const GrammarTable::Node& node(int32_t index) const { return grammar_.nodes[index]; }
    const int32_t* items(int32_t index) const { return grammar_.items(node(index)); }
    static bool is_large(const GrammarTable::Node& node) { return node.b > kSmallClass; }

    // Below: what is known of expressions before any text.

    void find_nullable() {
        is_nullable_.assign(grammar_.num_nodes, 0);
        for (bool is_new = true; is_new;) {
            is_new = false;
            for (int32_t i = grammar_.num_nodes - 1; i >= 0; --i) {
                const bool found = nullable(i);
                is_new = is_new || found != (is_nullable_[i] != 0);
                is_nullable_[i] = found;
            }
            budget_.check_time();
        }
    }

    bool nullable(int32_t index) const {
        const auto& one = node(index);
        const auto holds = [&](int32_t part) { return is_nullable_[part] != 0; };
        switch (one.kind) {
            case Kind::literal: return one.b == 0;
            case Kind::chars: return false;
            case Kind::concat:
            case Kind::conjunction:
                return std::all_of(items(index), items(index) + one.b, holds);
            case Kind::alt: return std::any_of(items(index), items(index) + one.b, holds);
            case Kind::repeat: return one.b == 0 || holds(one.a);
            case Kind::negation: return !holds(one.a);
            case Kind::ref: return holds(root(one.a));
        }
        return false;
    }

    int32_t root(int32_t rule) const {
        if (grammar_.rule_roots[rule] == -1) throw Failure{Code::unknown_rule, rule};
        return grammar_.rule_roots[rule];
    }

    void find_productive() {
        find_sizes();
        is_productive_.assign(grammar_.num_nodes, 0);
        for (int32_t i = 0; i < grammar_.num_nodes; ++i)
            if (is_operation(i) && is_reached_[i]) is_productive_[i] = !is_empty(i);
        for (bool is_new = true; is_new;) {
            is_new = false;
            for (int32_t i = grammar_.num_nodes - 1; i >= 0; --i) {
                if (is_productive_[i] || is_operation(i) || !productive(i)) continue;
                is_productive_[i] = is_new = true;
            }
            budget_.check_time();
        }
    }

    bool is_operation(int32_t index) const {
        return node(index).kind == Kind::conjunction || node(index).kind == Kind::negation;
    }

    bool productive(int32_t index) const {
        const auto& one = node(index);
        const auto holds = [&](int32_t part) { return is_productive_[part] != 0; };
        switch (one.kind) {
            case Kind::literal: return true;
            case Kind::chars: return one.b > 0;
            case Kind::concat: return std::all_of(items(index), items(index) + one.b, holds);
            case Kind::alt: return std::any_of(items(index), items(index) + one.b, holds);
            case Kind::repeat: return one.b == 0 || holds(one.a);
            case Kind::ref: return holds(root(one.a));
            default: return false;
        }
    }

    // Lower bounds: `is_finite_`: finitely many texts; `has_text_`: at least one, not empty;
    // `is_infinite_`: infinitely many. And which expressions stand in no operation.
    void find_sizes() {
        is_finite_.assign(grammar_.num_nodes, 0);
        has_text_ = is_infinite_ = is_reached_ = is_finite_;
        for (int32_t round = 0; round < 3; ++round)
            for (int32_t i = grammar_.num_nodes - 1; i >= 0; --i) find_size(i);
        std::vector<int32_t> pending{grammar_.start};
        is_reached_[grammar_.start] = 1;
        const auto reach = [&](int32_t index) {
            if (is_reached_[index]) return;
            is_reached_[index] = 1;
            pending.push_back(index);
        };
        while (!pending.empty()) {
            const int32_t index = pending.back();
            pending.pop_back();
            const auto& one = node(index);
            if (one.kind == Kind::concat || one.kind == Kind::alt)
                std::for_each(items(index), items(index) + one.b, reach);
            if (one.kind == Kind::repeat) reach(one.a);
            if (one.kind == Kind::ref) reach(root(one.a));
        }
    }

    void find_size(int32_t index) {
        const auto& one = node(index);
        const bool is_list = one.kind == Kind::concat || one.kind == Kind::alt;
        const int32_t *first = is_list ? items(index) : nullptr, *past = first + (is_list ? one.b : 0);
        const auto is_some = [&](int32_t part) { return has_text_[part] || is_nullable_[part]; };
        const auto in = [](const std::vector<uint8_t>& found) {
            return [&found](int32_t part) { return found[part] != 0; };
        };
        switch (one.kind) {
            case Kind::literal:
                is_finite_[index] = 1;
                has_text_[index] = one.b > 0;
                return;
            case Kind::chars:
                is_finite_[index] = 1;
                has_text_[index] = one.b > 0;
                return;
            case Kind::alt:
                is_finite_[index] = std::all_of(first, past, in(is_finite_));
                has_text_[index] = std::any_of(first, past, in(has_text_));
                is_infinite_[index] = std::any_of(first, past, in(is_infinite_));
                return;
            case Kind::concat: {
                const bool is_any = std::all_of(first, past, is_some);
                is_finite_[index] = std::all_of(first, past, in(is_finite_));
                has_text_[index] = is_any && std::any_of(first, past, in(has_text_));
                is_infinite_[index] = is_any && std::any_of(first, past, in(is_infinite_));
                return;
            }
            case Kind::repeat:
                is_finite_[index] = one.c >= 0 && is_finite_[one.a];
                has_text_[index] = one.c != 0 && has_text_[one.a];
                is_infinite_[index] = has_text_[index] && (one.c < 0 || is_infinite_[one.a]);
                return;
            default: return;
        }
    }

    // Without finitely many texts an infinite language is not empty, and the automaton, as large
    // as these texts, can wait until it is reached; any other is made to see.
    bool is_empty(int32_t index) {
        if (is_without_finite(index)) return false;
        return construction_.operation(index, {}, 0).start == kDead;
    }

    bool is_without_finite(int32_t index) const {
        const auto is_finite_negation = [&](int32_t part) {
            return node(part).kind == Kind::negation && is_finite_[node(part).a];
        };
        if (node(index).kind == Kind::negation) return is_finite_negation(index);
        int32_t num_infinite = 0;
        for (int32_t i = 0; i < node(index).b; ++i) {
            const int32_t part = items(index)[i];
            if (is_finite_negation(part)) continue;
            if (!is_infinite_[part]) return false;
            ++num_infinite;
        }
        return num_infinite <= 1;
    }

    // Bytes that no expression tells apart are one class; classes ascend with their bytes.
    void set_classes() {
        std::array<bool, 257> is_cut{};
        const auto cut = [&](int32_t low, int32_t high) { is_cut[low] = is_cut[high + 1] = true; };
        const auto cut_all = [&](const ByteEdges& found) {
            for (const auto& edge : found.edges) cut(edge.low, edge.high);
        };
        bool has_negation = false;
        for (int32_t i = 0; i < grammar_.num_nodes; ++i) {
            const auto& one = node(i);
            if (one.kind == Kind::literal)
                for (int32_t j = 0; j < one.b; ++j) cut(items(i)[j], items(i)[j]);
            if (one.kind == Kind::negation) has_negation = true;
            if (one.kind != Kind::chars) continue;
            if (!is_large(one)) {
                cut_all(construction_.small_class(i));
                continue;
            }
            for (int32_t j = 0; j < 2 * one.b && items(i)[j] < 0x80; j += 2)
                cut(items(i)[j], std::min(items(i)[j + 1], 0x7F));
            for (int32_t byte = 0x80; byte < 256; ++byte) is_cut[byte] = true;
        }
        constexpr int32_t kAnyText[] = {0, 0xD7FF, 0xE000, 0x10FFFF};
        if (has_negation) cut_all(byte_edges(kAnyText, 2));
        int32_t index = 0;
        for (int32_t byte = 0; byte < 256; ++byte) {
            if (byte > 0 && is_cut[byte]) ++index;
            class_of_[byte] = static_cast<uint8_t>(index);
        }
        num_classes_ = index + 1;
        table.class_of = class_of_.data();
        table.num_classes = num_classes_;
        table.lazy = this;
    }

    // Below: continuations.

    int32_t continuation(int32_t node, int32_t at, int32_t next) {
        const auto is_same = [&](const Continuation& one) {
            return one.node == node && one.at == at && one.next == next;
        };
        size_t slot = hashed(node, at, next) & (slots_.size() - 1);
        for (; slots_[slot] >= 0; slot = (slot + 1) & (slots_.size() - 1))
            if (is_same(continuations_[slots_[slot]])) return slots_[slot];
        const auto added = static_cast<int32_t>(continuations_.size());
        continuations_.push_back({node, at, next});
        of_single_.push_back(-1);
        seen_in_.push_back(0);
        slots_[slot] = added;
        if (2 * continuations_.size() > slots_.size()) grow();
        return added;
    }

    static size_t hashed(int32_t node, int32_t at, int32_t next) {
        uint64_t hash = static_cast<uint32_t>(node) * 0x9E3779B97F4A7C15u;
        hash = (hash ^ static_cast<uint32_t>(at)) * 0xFF51AFD7ED558CCDu;
        hash = (hash ^ (hash >> 29) ^ static_cast<uint32_t>(next)) * 0xC4CEB9FE1A85EC53u;
        return hash ^ (hash >> 32);
    }

    void grow() {
        slots_.assign(2 * slots_.size(), -1);
        for (size_t i = 0; i < continuations_.size(); ++i) {
            const auto& one = continuations_[i];
            size_t slot = hashed(one.node, one.at, one.next) & (slots_.size() - 1);
            while (slots_[slot] >= 0) slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = static_cast<int32_t>(i);
        }
    }

    int32_t entered(int32_t index, int32_t next) {
        const auto& one = node(index);
        int32_t at = 0;
        if (one.kind == Kind::chars) {
            at = is_large(one) ? construction_.large_class(index).start : ByteEdges::kEntry;
        } else if (is_operation(index)) {
            at = construction_.operation(index, {}, 0).start;
        }
        return continuation(index, at, next);
    }

    // Below: states.

    // Sets `leaves_` to the continuations that read a byte.
    void close(int32_t state) {
        ++round_;
        leaves_.clear();
        fewest_.clear();
        for (const int32_t* at = states_.begin(state); at != states_.end(state); ++at) reach(*at);
        while (!pending_.empty()) {
            const int32_t one = pending_.back();
            pending_.pop_back();
            if (++work_ > kMaxWork) {
                pending_.clear();
                throw Failure{Code::time};
            }
            expand(one, state);
        }
    }

    void reach(int32_t one) {
        if (seen_in_[one] == round_) return;
        seen_in_[one] = round_;
        pending_.push_back(one);
    }

    void enter(int32_t index, int32_t next) {
        if (is_productive_[index]) reach(entered(index, next));
    }

    void expand(int32_t index, int32_t state) {
        const Continuation one = continuations_[index];
        if (one.node == kEndNode) {
            is_accepting_[state] = 1;
            return;
        }
        if (one.node == kJoinNode) {
            for (const int32_t* at = joins_.begin(one.at); at != joins_.end(one.at); ++at) reach(*at);
            return;
        }
        const auto& own = node(one.node);
        const int32_t* parts = grammar_.payload + own.a;
        switch (own.kind) {
            case Kind::literal:
                if (own.b == 0) return reach(one.next);
                break;
            case Kind::chars: break;
            case Kind::concat: {
                if (own.b == 0) return reach(one.next);
                const bool is_last = one.at + 1 == own.b;
                return enter(parts[one.at], is_last ? one.next
                                                    : continuation(one.node, one.at + 1, one.next));
            }
            case Kind::alt:
                for (int32_t i = 0; i < own.b; ++i) enter(parts[i], one.next);
                return;
            case Kind::repeat: return expand_repeat(one, own);
            case Kind::ref: return enter(root(own.a), one.next);
            case Kind::conjunction:
            case Kind::negation:
                if (construction_.operation(one.node, {}, 0).accepting[one.at]) reach(one.next);
                break;
        }
        leaves_.push_back(index);
    }

    void expand_repeat(const Continuation& one, const GrammarTable::Node& own) {
        const bool is_nullable = is_nullable_[own.a] != 0;
        if (one.at >= own.b || is_nullable) reach(one.next);
        if (own.c >= 0 && one.at >= own.c) return;
        // Empty repetitions lead to all higher counts, which allow nothing that lower ones do not.
        if (is_nullable && !is_fewest(one)) return;
        const int32_t count = own.c < 0 ? std::min(one.at + 1, own.b) : one.at + 1;
        enter(own.a, continuation(one.node, count, one.next));
    }

    bool is_fewest(const Continuation& one) {
        for (auto& [node, next, at] : fewest_) {
            if (node != one.node || next != one.next) continue;
            if (at < one.at) return false;
            at = one.at;
            return true;
        }
        fewest_.push_back({one.node, one.next, one.at});
        return true;
    }

    // Of continuations that differ only in what follows one is left, with all that follows; so again
    // in what follows, down to `depth`. Sets `some` to the rest, ascending.
    void join_equal(std::vector<int32_t>& some, int32_t depth) {
        if (some.size() < 2) return;
        const auto key = [&](int32_t one) {
            const auto& found = continuations_[one];
            return static_cast<uint64_t>(static_cast<uint32_t>(found.node)) << 32 |
                   static_cast<uint32_t>(found.at);
        };
        std::sort(some.begin(), some.end(), [&](int32_t a, int32_t b) {
            return key(a) != key(b) ? key(a) < key(b) : a < b;
        });
        some.erase(std::unique(some.begin(), some.end()), some.end());
        work_ += static_cast<int64_t>(some.size());
        std::vector<int32_t> next;
        size_t num_kept = 0;
        for (size_t i = 0, past; i < some.size(); i = past) {
            for (past = i + 1; past < some.size() && key(some[past]) == key(some[i]);) ++past;
            const Continuation one = continuations_[some[i]];
            int32_t kept = some[i];
            if (past > i + 1 && one.node >= 0) {
                next.clear();
                for (size_t j = i; j < past; ++j) next.push_back(continuations_[some[j]].next);
                kept = continuation(one.node, one.at, joined(next, depth - 1));
            }
            some[num_kept++] = kept;
        }
        some.resize(num_kept);
        std::sort(some.begin(), some.end());
    }

    int32_t joined(std::vector<int32_t>& some, int32_t depth) {
        std::vector<int32_t> flat;
        for (const int32_t one : some) {
            const Continuation found = continuations_[one];
            if (found.node != kJoinNode) flat.push_back(one);
            else flat.insert(flat.end(), joins_.begin(found.at), joins_.end(found.at));
        }
        if (depth > 0) join_equal(flat, depth);
        std::sort(flat.begin(), flat.end());
        flat.erase(std::unique(flat.begin(), flat.end()), flat.end());
        return flat.size() == 1 ? flat[0] : continuation(kJoinNode, joins_.intern(flat), 0);
    }

    void add_edges(int32_t index) {
        const Continuation one = continuations_[index];
        const auto& own = node(one.node);
        if (own.kind == Kind::literal) {
            const int32_t byte_class = class_of_[grammar_.items(own)[one.at]];
            const bool is_last = one.at + 1 == own.b;
            add_edge(byte_class, byte_class,
                     is_last ? one.next : continuation(one.node, one.at + 1, one.next));
        } else if (own.kind == Kind::chars && !is_large(own)) {
            for (const auto& edge : construction_.small_class(one.node).edges) {
                if (edge.from != one.at) continue;
                const bool is_last = edge.to == ByteEdges::kExit;
                add_edge(class_of_[edge.low], class_of_[edge.high],
                         is_last ? one.next : continuation(one.node, edge.to, one.next));
            }
        } else if (own.kind == Kind::chars) {
            add_edges_of(construction_.large_class(one.node), one, true);
        } else {
            add_edges_of(construction_.operation(one.node, {}, 0), one, false);
        }
    }

    // Of a class an accepting state is its end.
    void add_edges_of(const Dfa& dfa, const Continuation& one, bool is_class) {
        const int32_t* row = dfa.row(one.at);
        for (int32_t byte = 0; byte < 256;) {
            const int32_t low = byte, to = row[dfa.class_of[byte]];
            while (byte < 256 && row[dfa.class_of[byte]] == to) ++byte;
            if (to == kDead) continue;
            add_edge(class_of_[low], class_of_[byte - 1],
                     is_class && dfa.accepting[to] ? one.next : continuation(one.node, to, one.next));
        }
    }

    void add_edge(int32_t low, int32_t high, int32_t to) {
        ++work_;
        edges_.push_back({low, high, to});
    }

    // Sweeps over the classes; between two ends of edges all classes have one target.
    void fill_classes(size_t row) {
        std::sort(edges_.begin(), edges_.end(),
                  [](const Edge& a, const Edge& b) { return a.low < b.low; });
        active_.clear();
        size_t next = 0;
        int32_t low = 0;
        while (next < edges_.size() || !active_.empty()) {
            if (active_.empty()) low = edges_[next].low;
            while (next < edges_.size() && edges_[next].low <= low) active_.push_back(edges_[next++]);
            int32_t high = next < edges_.size() ? edges_[next].low - 1 : num_classes_ - 1;
            for (const auto& edge : active_) high = std::min(high, edge.high);
            const int32_t target = active_.size() == 1 ? state_of(active_[0].to) : state_of_active();
            std::fill_n(transitions_.begin() + static_cast<int64_t>(row) + low, high - low + 1,
                        target);
            work_ += static_cast<int64_t>(active_.size());
            active_.erase(std::remove_if(active_.begin(), active_.end(),
                                         [&](const Edge& edge) { return edge.high <= high; }),
                          active_.end());
            low = high + 1;
        }
    }

    int32_t state_of(int32_t one) {
        if (of_single_[one] < 0) {
            targets_ = {one};
            of_single_[one] = interned();
        }
        return of_single_[one];
    }

    int32_t state_of_active() {
        targets_.clear();
        for (const auto& edge : active_) targets_.push_back(edge.to);
        join_equal(targets_, kMaxJoined);
        return targets_.size() == 1 ? state_of(targets_[0]) : interned();
    }

    int32_t interned() {
        const int32_t before = states_.size(), state = states_.intern(targets_);
        if (states_.size() > before) add_row();
        return state;
    }

    void add_row() {
        transitions_.resize(transitions_.size() + num_classes_, states_.size() == 1 ? kDead : -1);
        is_accepting_.push_back(0);
        runs_.push_back(-1);
        table.transitions = transitions_.data();
        table.runs = runs_.data();
    }

    const std::vector<int32_t> words_;
    const GrammarTable grammar_;
    Budget budget_;
    const Budget endless_{0, 0, 1e300};
    Construction construction_;
    std::vector<uint8_t> is_nullable_, is_productive_, is_finite_, has_text_, is_infinite_,
        is_reached_;
    std::array<uint8_t, 256> class_of_{};
    int32_t num_classes_ = 1, start_ = kDead;

    std::vector<Continuation> continuations_;
    std::vector<int32_t> slots_, of_single_;
    std::vector<uint32_t> seen_in_;
    SetTable states_, joins_;
    std::vector<int32_t> transitions_;
    std::vector<uint8_t> is_accepting_;
    std::vector<int16_t> runs_;

    uint32_t round_ = 0;
    int64_t work_ = 0;
    std::vector<int32_t> pending_, leaves_, targets_;
    std::vector<std::array<int32_t, 3>> fewest_;
    std::vector<Edge> edges_, active_;
};

void fill_row(Lazy& lazy, int32_t state) { lazy.fill(state); }
void begin_call(Lazy& lazy) { lazy.begin(); }

}  // namespace stemma

using stemma::Budget;
using stemma::Code;
using stemma::Lazy;

// As `stemma_build_automaton`; the limits are those of operations.
extern "C" Lazy* stemma_lazy_automaton(
    const int32_t* words, int64_t num_words, int64_t max_nfa_states, int64_t max_states,
    double max_cpu_s, int32_t* outcome
) {
    try {
        const Budget budget{max_nfa_states, max_states, stemma::thread_cpu_s() + max_cpu_s};
        auto lazy = std::make_unique<Lazy>(words, num_words, budget);
        outcome[0] = static_cast<int32_t>(Code::ok);
        outcome[1] = 0;
        return lazy.release();
    } catch (const stemma::Failure& failure) {
        outcome[0] = static_cast<int32_t>(failure.code);
        outcome[1] = failure.detail;
    } catch (const std::exception&) {
        outcome[0] = static_cast<int32_t>(Code::memory);
        outcome[1] = 0;
    }
    return nullptr;
}

extern "C" void stemma_free_lazy_automaton(Lazy* lazy) { delete lazy; }

extern "C" const stemma::Table* stemma_lazy_table(const Lazy* lazy) { return &lazy->table; }

extern "C" int32_t stemma_lazy_start(const Lazy* lazy) { return lazy->start(); }

// The state after `size` bytes.
extern "C" int32_t stemma_lazy_step(Lazy* lazy, int32_t state, const uint8_t* data, int64_t size) {
    lazy->begin();
    for (int64_t i = 0; i < size && state != stemma::kDead; ++i)
        state = lazy->table.step(state, data[i]);
    return state;
}

extern "C" int32_t stemma_lazy_accepts(Lazy* lazy, int32_t state) {
    lazy->begin();
    return lazy->accepts(state);
}

extern "C" int32_t stemma_lazy_exit(Lazy* lazy, int32_t state) {
    lazy->begin();
    return lazy->exit(state);
}

// `sizes`: number of states, bytes.
extern "C" void stemma_lazy_sizes(const Lazy* lazy, int64_t* sizes) {
    sizes[0] = lazy->num_states();
    sizes[1] = static_cast<int64_t>(lazy->num_bytes());
}
