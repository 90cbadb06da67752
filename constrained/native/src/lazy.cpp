// Grammars as automata whose states are made when an output first reaches them, recursive ones too.
//
// A continuation is what is left of one expression, and of all that it stands in: a list whose
// equal ends are shared, so that a rule at the end of a rule adds nothing to it. A state is a set of
// continuations, one for each way to read the text so far; its transitions are found when they are
// first asked for. Continuations of the same expression before different ends become one with all
// of these ends (as in a graph-structured stack: Tomita, "An Efficient Augmented-Context-Free
// Parsing Algorithm", 1987), so that a state has no more of them than the grammar has places. Of And and
// Not a continuation has the states of all parts, each followed by an end of its own. No state is
// dead: every expression that is entered matches something, which is checked once, and a search
// from each new combination of states in an operation finds a match, or the way is closed.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "set_table.h"
#include "table.h"

namespace stemma {
namespace {

constexpr int32_t kSmallClass = 8;  // ranges, as in thompson.cpp
constexpr int32_t kEndNode = -1, kJoinNode = -2, kOperation = -3;  // in place of a node
constexpr int32_t kNoTuple = -1;
// Continuations: the last one is of parts of operations.
constexpr int32_t kNothing = -1, kEndOfText = 0, kEndOfPart = 1;
constexpr int32_t kUnknown = 0, kLive = 1, kDeadEnd = 2;
constexpr size_t kMaxNested = 100;    // operations within each other
constexpr int32_t kMaxJoined = 500;  // levels: each is a call
// Unless told otherwise. Bytes: then it is full; twice as much is a failure.
constexpr int64_t kMaxBytes = int64_t{160} << 20;
constexpr int64_t kMaxWork = 8'000'000;  // steps of one call, of 50 to 100 ns
constexpr int64_t kStepsOfContinuation = 3, kClassesOfStep = 4;
constexpr int64_t kTimedSteps = 16'384;  // before any text the budget's time is the limit
// Expressions between two bytes; beyond, rules go round without one (left recursion).
constexpr int64_t kMaxExpanded = 200'000;

// The rest of `node` from `at` on, and then `next`. `at` is a byte of a literal, a part of a
// sequence, the repetitions so far, a state of a class, or the tuple of an operation.
struct Continuation {
    int32_t node, at, next;
};

constexpr Budget kEndless{0, 0, 1e300};

// What outputs have reached.
struct Made {
    std::vector<Continuation> continuations_;
    std::vector<int32_t> slots_ = std::vector<int32_t>(256, -1), of_single_;
    std::vector<uint32_t> seen_in_;
    SetTable states_{kEndless}, joins_{kEndless}, tuples_{kEndless};
    std::vector<uint8_t> liveness_;  // of tuples
    std::vector<int32_t> transitions_;
    std::vector<uint8_t> is_accepting_;
    std::vector<int16_t> runs_;
};

}  // namespace

class Lazy : Made {
  public:
    Lazy(const int32_t* words, int64_t num_words, const Budget& budget)
        : words_(words, words + num_words), grammar_(words_.data(), num_words), budget_(budget),
          construction_(grammar_, budget_) {
        find_nullable();
        set_classes();
        begin_empty();
        find_productive();
        is_timed_ = false;
        begin();
        if (is_productive_[grammar_.start]) start_ = state_entered(grammar_.start, kEndOfText);
    }

    Table table{};

    int32_t start() const { return start_; }
    int32_t num_states() const { return states_.size(); }
    void begin() { work_ = 0; }
    void set_limits(int64_t max_work, int64_t max_bytes) {
        max_work_ = max_work;
        max_bytes_ = static_cast<size_t>(max_bytes);
    }

    size_t num_bytes() const {
        return 4 * (transitions_.capacity() + words_.capacity() + slots_.capacity()) +
               16 * continuations_.capacity() + states_.num_bytes() + joins_.num_bytes() +
               tuples_.num_bytes() +
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
        if (has_failed()) return;
        if (depth_ == scratches_.size()) scratches_.push_back(std::make_unique<Scratch>());
        Scratch* const outer = s_;
        s_ = scratches_[depth_++].get();
        try {
            if (depth_ > kMaxNested) throw Failure{Code::nesting};
            close(state);
            join_equal(s_->leaves, kMaxJoined);
            s_->edges.clear();
            for (const int32_t one : s_->leaves) add_edges(one);
            fill_classes(row);
        } catch (const Failure&) {
            table.limit = Table::kFailed;
        } catch (const std::bad_alloc&) {
            table.limit = Table::kFailed;
        }
        s_ = outer;
        --depth_;
        if (num_bytes() > max_bytes_ && !has_failed())
            table.limit = num_bytes() > 2 * max_bytes_ ? Table::kFailed : Table::kFull;
    }

    // Forgets all states but the start and these, and sets `kept` to their new numbers. Returns
    // whether there was memory for that; else all is as it was.
    bool keep(int32_t* kept, int64_t num_kept) {
        const int32_t start = start_;
        Made before;
        swap_made(before);
        try {
            begin_empty();
            Copy copy{*this, before};
            start_ = copy.state(start);
            std::vector<int32_t> states;
            for (int64_t i = 0; i < num_kept; ++i) states.push_back(copy.state(kept[i]));
            std::copy(states.begin(), states.end(), kept);
        } catch (const std::exception&) {
            swap_made(before);
            start_ = start;
            return false;
        }
        table.limit = 0;
        return true;
    }

  private:
    struct Edge {
        int32_t low, high, to;  // classes, a continuation
    };

    // Copies states of `before` with all that they are made of. That was made before them, so it is
    // a graph without cycles; it may be as deep as a text is nested, so no recursion follows it.
    struct Copy {
        enum class What { continuation, tuple, state };
        struct Item {
            What what;
            int32_t index;
        };
        Lazy& to;
        const Made& before;
        std::array<std::unordered_map<int32_t, int32_t>, 3> found{
            {{{kEndOfText, kEndOfText}, {kEndOfPart, kEndOfPart}}, {}, {{kDead, kDead}}}};
        std::vector<Item> pending{};

        int32_t state(int32_t index) {
            pending.push_back({What::state, index});
            while (!pending.empty()) {
                const Item one = pending.back();
                const size_t size = pending.size();
                if (of(one.what).count(one.index) == 0) {
                    const int32_t made = made_of(one);
                    if (pending.size() > size) continue;  // its parts come first
                    of(one.what)[one.index] = made;
                }
                pending.pop_back();
            }
            return of(What::state)[index];
        }

        std::unordered_map<int32_t, int32_t>& of(What what) {
            return found[static_cast<size_t>(what)];
        }

        // Its copy's number; or adds to `pending` what has none yet.
        int32_t made_of(const Item& one) {
            switch (one.what) {
                case What::continuation: return continuation(before.continuations_[one.index]);
                case What::tuple: return tuple(one.index);
                case What::state: break;
            }
            const auto kernel = copies(
                What::continuation, before.states_.begin(one.index), before.states_.end(one.index));
            return kernel.empty() ? 0 : to.interned(kernel);
        }

        int32_t continuation(const Continuation& one) {
            if (one.node == kJoinNode) {
                const auto ends = copies(
                    What::continuation, before.joins_.begin(one.at), before.joins_.end(one.at));
                return ends.empty() ? 0 : to.continuation(kJoinNode, to.joins_.intern(ends), 0);
            }
            int32_t at = one.at, next = 0;
            const bool is_ready = copy(What::continuation, one.next, next);
            if (one.node == kOperation && !copy(What::tuple, one.at, at)) return 0;
            return is_ready ? to.continuation(one.node, at, next) : 0;
        }

        int32_t tuple(int32_t index) {
            std::vector<int32_t> made(before.tuples_.begin(index), before.tuples_.end(index));
            bool is_ready = true;
            for (size_t i = 1; i < made.size(); ++i) {
                int32_t state = 0;
                is_ready = copy(What::state, made[i] >> 1, state) && is_ready;
                made[i] = state << 1 | (made[i] & 1);
            }
            std::sort(made.begin() + 1, made.end());
            return is_ready ? to.interned_tuple(made) : 0;
        }

        // The set's copy, ascending; empty where one has none yet.
        std::vector<int32_t> copies(What what, const int32_t* first, const int32_t* past) {
            std::vector<int32_t> made;
            bool is_ready = true;
            for (; first != past; ++first) {
                made.push_back(0);
                is_ready = copy(what, *first, made.back()) && is_ready;
            }
            if (!is_ready) return {};
            std::sort(made.begin(), made.end());
            return made;
        }

        bool copy(What what, int32_t index, int32_t& made) {
            const auto known = of(what).find(index);
            if (known == of(what).end()) {
                pending.push_back({what, index});
                return false;
            }
            made = known->second;
            return true;
        }
    };

    bool has_failed() const { return table.limit == Table::kFailed; }

    void begin_empty() {
        for (const int32_t end : {kEndOfText, kEndOfPart}) continuation(kEndNode, end, 0);
        states_.intern({});
        add_row();
    }

    void swap_made(Made& other) {
        std::swap(static_cast<Made&>(*this), other);
        table.transitions = transitions_.data();
        table.runs = runs_.data();
    }

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

    // Within operations a part may seem productive that is not: their states are searched anyway.
    void find_productive() {
        find_sizes();
        std::vector<uint8_t> is_void(grammar_.num_nodes, 0);
        find_productive(is_void);
        bool is_any_void = false;
        for (int32_t i = 0; i < grammar_.num_nodes; ++i) {
            if (!is_operation(i) || !is_reached_[i] || is_without_finite(i)) continue;
            const int32_t first = first_tuple(i);
            is_void[i] = first == kNoTuple || !is_live(first);
            if (has_failed()) throw Failure{Code::states};
            is_any_void = is_any_void || is_void[i];
            budget_.check_time();
        }
        if (is_any_void) find_productive(is_void);
    }

    void find_productive(const std::vector<uint8_t>& is_void) {
        is_productive_.assign(grammar_.num_nodes, 0);
        for (int32_t i = 0; i < grammar_.num_nodes; ++i)
            is_productive_[i] = is_operation(i) && !is_void[i];
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

    // Without finitely many texts an infinite language is not empty; any other is searched.
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
        bool has_operation = false;
        for (int32_t i = 0; i < grammar_.num_nodes; ++i) {
            const auto& one = node(i);
            if (one.kind == Kind::literal)
                for (int32_t j = 0; j < one.b; ++j) cut(items(i)[j], items(i)[j]);
            has_operation = has_operation || is_operation(i);
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
        if (has_operation) cut_all(byte_edges(kAnyText, 2));
        int32_t index = 0;
        for (int32_t byte = 0; byte < 256; ++byte) {
            if (byte > 0 && is_cut[byte]) ++index;
            class_of_[byte] = static_cast<uint8_t>(index);
            if (byte == 0 || is_cut[byte]) first_byte_.push_back(byte);
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
        work_ += kStepsOfContinuation;
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

    // kNothing: where the parts of an operation exclude each other.
    int32_t entered(int32_t index, int32_t next) {
        const auto& one = node(index);
        int32_t at = 0;
        if (one.kind == Kind::chars) {
            at = is_large(one) ? construction_.large_class(index).start : ByteEdges::kEntry;
        } else if (is_operation(index)) {
            at = first_tuple(index);
            return at == kNoTuple ? kNothing : continuation(kOperation, at, next);
        }
        return continuation(index, at, next);
    }

    // Below: states.

    // Sets `s_->leaves` to the continuations that read a byte.
    void close(int32_t state) {
        s_->round = ++round_;
        s_->pending.clear();
        s_->leaves.clear();
        s_->fewest.clear();
        s_->calls.clear();
        for (const int32_t* at = states_.begin(state); at != states_.end(state); ++at) reach(*at);
        int64_t num_left = kMaxExpanded;
        do {
            while (!s_->pending.empty()) {
                const int32_t one = s_->pending.back();
                s_->pending.pop_back();
                check_work();
                if (--num_left < 0) throw Failure{Code::time};
                expand(one, state);
            }
            enter_rules();
        } while (!s_->pending.empty());
    }

    // A rule that many continuations come to is entered once, with all that follows it: else each
    // level of a recursive union would multiply the last one's alternatives.
    void enter_rules() {
        auto& calls = s_->calls;
        std::sort(calls.begin(), calls.end());
        std::vector<int32_t> next;
        for (size_t i = 0, past; i < calls.size(); i = past) {
            next.clear();
            for (past = i; past < calls.size() && calls[past].first == calls[i].first; ++past)
                next.push_back(calls[past].second);
            enter(calls[i].first, next.size() == 1 ? next[0] : joined(next, kMaxJoined - 1));
        }
        calls.clear();
    }

    void reach(int32_t one) {
        if (seen_in_[one] == s_->round) return;
        seen_in_[one] = s_->round;
        s_->pending.push_back(one);
    }

    void enter(int32_t index, int32_t next) {
        if (!is_productive_[index]) return;
        const int32_t one = entered(index, next);
        if (one != kNothing) reach(one);
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
        if (one.node == kOperation) {
            if (is_match(one.at)) reach(one.next);
            s_->leaves.push_back(index);
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
            case Kind::ref: s_->calls.push_back({root(own.a), one.next}); return;
            case Kind::conjunction:
            case Kind::negation: break;  // kOperation stands for these
        }
        s_->leaves.push_back(index);
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
        work_ += static_cast<int64_t>(s_->fewest.size());
        for (auto& [node, next, at] : s_->fewest) {
            if (node != one.node || next != one.next) continue;
            if (at < one.at) return false;
            at = one.at;
            return true;
        }
        s_->fewest.push_back({one.node, one.next, one.at});
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
        check_work();
        std::vector<int32_t> next;
        size_t num_kept = 0;
        for (size_t i = 0, past; i < some.size(); i = past) {
            for (past = i + 1; past < some.size() && key(some[past]) == key(some[i]);) ++past;
            const Continuation one = continuations_[some[i]];
            int32_t kept = some[i];
            if (past > i + 1 && (one.node >= 0 || one.node == kOperation)) {
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
        if (one.node == kOperation) return add_edges_of_tuple(one);
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
        } else {
            add_edges_of(construction_.large_class(one.node), one);
        }
    }

    void add_edges_of(const Dfa& dfa, const Continuation& one) {
        const int32_t* row = dfa.row(one.at);
        for (int32_t byte = 0; byte < 256;) {
            const int32_t low = byte, to = row[dfa.class_of[byte]];
            while (byte < 256 && row[dfa.class_of[byte]] == to) ++byte;
            if (to == kDead) continue;
            add_edge(class_of_[low], class_of_[byte - 1],
                     dfa.accepting[to] ? one.next : continuation(one.node, to, one.next));
        }
    }

    void add_edges_of_tuple(const Continuation& one) {
        for (int32_t c = 0; c < num_classes_;) {
            const int32_t low = c, to = after(one.at, c);
            c = end_of_equal(one.at, c);
            if (to != kNoTuple && is_live(to))
                add_edge(low, c - 1, continuation(kOperation, to, one.next));
        }
    }

    // Below: operations. A tuple is what must match and what must not, whichever expression asked
    // for that: [a state of Unicode texts, where no part must match; else 0], then ascending for
    // each part twice its state, and 1 where it must not match. Parts that cannot match any more
    // and need not are left out.

    int32_t first_tuple(int32_t index) {
        std::vector<int32_t> tuple{universe().start};
        each_part(index, [&](int32_t part, bool is_negated) {
            const int32_t state = is_productive_[part] ? state_entered(part, kEndOfPart) : kDead;
            tuple.push_back(state << 1 | is_negated);
        });
        return simplified_tuple(tuple);
    }

    int32_t simplified_tuple(std::vector<int32_t>& tuple) {
        const auto past = std::remove(tuple.begin() + 1, tuple.end(), kDead << 1 | 1);
        tuple.erase(past, tuple.end());
        std::sort(tuple.begin() + 1, tuple.end());
        tuple.erase(std::unique(tuple.begin() + 1, tuple.end()), tuple.end());
        for (size_t i = 1; i < tuple.size(); ++i) {
            if (tuple[i] == kDead << 1) return kNoTuple;
            if (i > 1 && tuple[i] >> 1 == tuple[i - 1] >> 1) return kNoTuple;  // must and must not
            if ((tuple[i] & 1) == 0) tuple[0] = kDead;
        }
        return interned_tuple(tuple);
    }

    const Dfa& universe() { return construction_.any_text(); }

    int32_t state_entered(int32_t index, int32_t next) {
        const int32_t one = entered(index, next);
        return one == kNothing ? kDead : state_of(one);
    }

    // Calls `see` with each part and whether it must not match.
    template <typename See> void each_part(int32_t index, See see) const {
        if (node(index).kind == Kind::negation) return see(node(index).a, true);
        for (int32_t i = 0; i < node(index).b; ++i) {
            const int32_t part = items(index)[i];
            const bool is_negated = node(part).kind == Kind::negation;
            see(is_negated ? node(part).a : part, is_negated);
        }
    }

    int32_t interned_tuple(const std::vector<int32_t>& tuple) {
        const int32_t found = tuples_.intern(tuple);
        if (found == static_cast<int32_t>(liveness_.size())) liveness_.push_back(kUnknown);
        return found;
    }

    int32_t target(int32_t state, int32_t byte_class) {
        const size_t at = static_cast<size_t>(state) * num_classes_ + byte_class;
        if (transitions_[at] < 0) fill(state);
        return transitions_[at];
    }

    // The tuple after a byte; kNoTuple where a part that is required cannot match any more.
    int32_t after(int32_t index, int32_t byte_class) {
        check_work();
        std::vector<int32_t> tuple(tuples_.begin(index), tuples_.end(index));
        if (tuple[0] != kDead) {
            tuple[0] = after_in_universe(tuple[0], byte_class);
            if (tuple[0] == kDead) return kNoTuple;
        }
        for (size_t i = 1; i < tuple.size(); ++i) {
            const int32_t to = target(tuple[i] >> 1, byte_class), is_negated = tuple[i] & 1;
            if (to == kDead && !is_negated) return kNoTuple;
            tuple[i] = to << 1 | is_negated;
        }
        return simplified_tuple(tuple);
    }

    int32_t after_in_universe(int32_t state, int32_t byte_class) {
        const Dfa& texts = universe();
        return texts.row(state)[texts.class_of[first_byte_[byte_class]]];
    }

    // The first class from `byte_class` on that leads elsewhere.
    int32_t end_of_equal(int32_t index, int32_t byte_class) {
        const std::vector<int32_t> tuple(tuples_.begin(index), tuples_.end(index));
        const auto leads = [&](int32_t c) {
            return tuple[0] == kDead ? kDead : after_in_universe(tuple[0], c);
        };
        int32_t past = byte_class + 1;
        for (; past < num_classes_ && leads(past) == leads(byte_class); ++past)
            for (size_t i = 1; i < tuple.size(); ++i)
                if (target(tuple[i] >> 1, past) != target(tuple[i] >> 1, byte_class)) return past;
        return past;
    }

    bool is_match(int32_t index) {
        const std::vector<int32_t> tuple(tuples_.begin(index), tuples_.end(index));
        if (tuple[0] != kDead && !universe().accepting[tuple[0]]) return false;
        return std::all_of(tuple.begin() + 1, tuple.end(), [&](int32_t part) {
            return accepts(part >> 1) != ((part & 1) != 0);
        });
    }

    // Whether some text leads to a match: a search, breadth first, which ends at the first one.
    bool is_live(int32_t index) {
        if (liveness_[index] != kUnknown) return liveness_[index] == kLive;
        std::vector<int32_t> found{index}, from{-1};
        std::unordered_map<int32_t, bool> is_seen{{index, true}};
        for (size_t at = 0; at < found.size(); ++at) {
            if (liveness_[found[at]] == kLive || is_match(found[at])) {
                for (auto i = static_cast<int32_t>(at); i >= 0; i = from[i])
                    liveness_[found[i]] = kLive;
                return true;
            }
            for (int32_t c = 0; c < num_classes_; c = end_of_equal(found[at], c)) {
                const int32_t next = after(found[at], c);
                if (next == kNoTuple || liveness_[next] == kDeadEnd) continue;
                if (!is_seen.emplace(next, true).second) continue;
                found.push_back(next);
                from.push_back(static_cast<int32_t>(at));
            }
        }
        for (const int32_t one : found) liveness_[one] = kDeadEnd;
        return false;
    }

    void check_work() {
        ++work_;
        if (is_timed_) {
            if (work_ >= timed_until_) {
                budget_.check_time();
                timed_until_ = work_ + kTimedSteps;
            }
        } else if (work_ > max_work_) {
            throw Failure{Code::time};
        }
        if (has_failed()) throw Failure{Code::time};
    }

    void add_edge(int32_t low, int32_t high, int32_t to) {
        ++work_;
        s_->edges.push_back({low, high, to});
    }

    // Sweeps over the classes; between two ends of edges all classes have one target.
    void fill_classes(size_t row) {
        std::sort(s_->edges.begin(), s_->edges.end(),
                  [](const Edge& a, const Edge& b) { return a.low < b.low; });
        s_->active.clear();
        size_t next = 0;
        int32_t low = 0;
        while (next < s_->edges.size() || !s_->active.empty()) {
            if (s_->active.empty()) low = s_->edges[next].low;
            while (next < s_->edges.size() && s_->edges[next].low <= low) s_->active.push_back(s_->edges[next++]);
            int32_t high = next < s_->edges.size() ? s_->edges[next].low - 1 : num_classes_ - 1;
            for (const auto& edge : s_->active) high = std::min(high, edge.high);
            const int32_t target = s_->active.size() == 1 ? state_of(s_->active[0].to) : state_of_active();
            std::fill_n(transitions_.begin() + static_cast<int64_t>(row) + low, high - low + 1,
                        target);
            work_ += static_cast<int64_t>(s_->active.size());
            s_->active.erase(std::remove_if(s_->active.begin(), s_->active.end(),
                                         [&](const Edge& edge) { return edge.high <= high; }),
                          s_->active.end());
            low = high + 1;
        }
    }

    int32_t state_of(int32_t one) {
        if (of_single_[one] < 0) {
            const int32_t state = interned({one});
            of_single_[one] = state;
        }
        return of_single_[one];
    }

    int32_t state_of_active() {
        auto& targets = s_->targets;
        targets.clear();
        for (const auto& edge : s_->active) targets.push_back(edge.to);
        join_equal(targets, kMaxJoined);
        return targets.size() == 1 ? state_of(targets[0]) : interned(targets);
    }

    int32_t interned(const std::vector<int32_t>& kernel) {
        const int32_t before = states_.size(), state = states_.intern(kernel);
        if (states_.size() > before) add_row();
        return state;
    }

    void add_row() {
        work_ += num_classes_ / kClassesOfStep;
        transitions_.resize(transitions_.size() + num_classes_, states_.size() == 1 ? kDead : -1);
        is_accepting_.push_back(0);
        runs_.push_back(-1);
        table.transitions = transitions_.data();
        table.runs = runs_.data();
    }

    const std::vector<int32_t> words_;
    const GrammarTable grammar_;
    Budget budget_;
    Construction construction_;
    std::vector<uint8_t> is_nullable_, is_productive_, is_finite_, has_text_, is_infinite_,
        is_reached_;
    std::array<uint8_t, 256> class_of_{};
    int32_t num_classes_ = 1, start_ = kDead;

    std::vector<int32_t> first_byte_;  // of classes

    // Of one row in the making; a row of an operation needs others, of its parts.
    struct Scratch {
        uint32_t round = 0;
        std::vector<int32_t> pending, leaves, targets;
        std::vector<std::array<int32_t, 3>> fewest;
        std::vector<std::pair<int32_t, int32_t>> calls;  // of rules: root, what follows
        std::vector<Edge> edges, active;
    };
    std::vector<std::unique_ptr<Scratch>> scratches_;
    size_t depth_ = 0;
    Scratch* s_ = nullptr;
    uint32_t round_ = 0;
    int64_t work_ = 0, max_work_ = kMaxWork;
    size_t max_bytes_ = kMaxBytes;
    int64_t timed_until_ = 0;
    bool is_timed_ = true;
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

// Steps of one call, and bytes, from now on.
extern "C" void stemma_lazy_limits(Lazy* lazy, int64_t max_work, int64_t max_bytes) {
    lazy->set_limits(max_work, max_bytes);
}

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

// Forgets all states but the start and `kept` [num_kept], which become their new numbers; 0: there is
// no memory for that, and nothing was changed.
extern "C" int32_t stemma_lazy_keep(Lazy* lazy, int32_t* kept, int64_t num_kept) {
    return lazy->keep(kept, num_kept);
}

// `sizes`: number of states, bytes.
extern "C" void stemma_lazy_sizes(const Lazy* lazy, int64_t* sizes) {
    sizes[0] = lazy->num_states();
    sizes[1] = static_cast<int64_t>(lazy->num_bytes());
}
