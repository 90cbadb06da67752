// Grammars to minimal byte automata: the same construction as regular/reference.py, which is its
// truth. No recursion follows the grammar's depth, but that of And and Not, which is bounded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace stemma {

enum class Code : int32_t {
    ok, not_regular, nfa_states, states, time, memory, nesting, malformed, unknown_rule,
};

struct Failure {
    Code code;
    int32_t detail = 0;  // the rule, of not_regular and unknown_rule
};

double thread_cpu_s();  // CPU time of this thread, in seconds

// Limits of one build; each check throws Failure.
struct Budget {
    int64_t max_nfa_states, max_states;
    double ends_at;  // of thread_cpu_s

    void check_nfa(size_t num_states) const;
    void check_dfa(size_t num_states) const;
    void check_memory(size_t num_words) const;  // 4 bytes each, of any one table
    void check_time() const;
};

enum class Kind : int32_t { literal, chars, concat, alt, repeat, conjunction, negation, ref };

// The grammar as flat_grammar.py writes it. The constructor checks every index.
struct GrammarTable {
    struct Node {
        Kind kind;
        int32_t a, b, c;
    };

    GrammarTable(const int32_t* words, int64_t num_words);
    const int32_t* items(const Node& node) const { return payload + node.a; }

    const Node* nodes;
    const int32_t* rule_roots;  // node of each rule; -1: there is none
    const int32_t* payload;
    int32_t num_nodes, num_rules;
    int32_t start;  // node
};

constexpr int32_t kDead = 0;

// Complete: one transition for each class of bytes from each state; the dead state is 0.
struct Dfa {
    std::array<uint8_t, 256> class_of{};
    int32_t num_classes = 1;
    std::vector<int32_t> transitions;  // [num_states, num_classes]
    std::vector<uint8_t> accepting;
    int32_t start = kDead;

    int32_t num_states() const { return static_cast<int32_t>(accepting.size()); }
    const int32_t* row(int32_t state) const {
        return transitions.data() + static_cast<size_t>(state) * num_classes;
    }
};

constexpr int32_t kStart = 0, kAccept = 1;  // of an Nfa

struct Nfa {
    struct Edge {
        int32_t to, next;
        uint8_t low, high;
    };
    struct Move {
        int32_t to, next;
    };

    int32_t new_state(const Budget& budget) {
        first_edge.push_back(-1);
        first_move.push_back(-1);
        budget.check_nfa(first_edge.size());
        budget.check_memory(3 * edges.size());
        return static_cast<int32_t>(first_edge.size()) - 1;
    }
    void add_edge(int32_t from, uint8_t low, uint8_t high, int32_t to) {
        edges.push_back({to, first_edge[from], low, high});
        first_edge[from] = static_cast<int32_t>(edges.size()) - 1;
    }
    void add_move(int32_t from, int32_t to) {
        if (from == to) return;
        moves.push_back({to, first_move[from]});
        first_move[from] = static_cast<int32_t>(moves.size()) - 1;
    }

    std::vector<int32_t> first_edge, first_move;  // of each state; -1: none
    std::vector<Edge> edges;
    std::vector<Move> moves;
};

// The byte edges of one set of code points between two states.
struct ByteEdges {
    static constexpr int32_t kEntry = -1, kExit = -2;
    struct Edge {
        int32_t from, to;  // inner states count from 0
        uint8_t low, high;
    };
    int32_t num_inner = 0;
    std::vector<Edge> edges;
};
ByteEdges byte_edges(const int32_t* ranges, int32_t num_ranges);

Dfa subsets(const Nfa& nfa, const Budget& budget);
Dfa minimal(const Dfa& dfa, const Budget& budget);
// Texts in `a` and in `b`; or, with `is_difference`, in `a` and not in `b`.
Dfa product(const Dfa& a, const Dfa& b, bool is_difference, const Budget& budget);

// One grammar's automaton.
class Construction {
  public:
    Construction(const GrammarTable& table, const Budget& budget)
        : table_(table), budget_(budget) {}
    Dfa run() { return determinised(table_.start, {}, 0); }

  private:
    friend class Thompson;
    friend class Lazy;
    Dfa determinised(int32_t node, std::vector<int32_t> open_rules, int32_t depth);
    const Dfa& operation(int32_t node, const std::vector<int32_t>& open_rules, int32_t depth);
    const Dfa& any_text();
    const Dfa& large_class(int32_t node);
    const ByteEdges& small_class(int32_t node);

    const GrammarTable& table_;
    const Budget& budget_;
    std::unordered_map<int32_t, Dfa> automata_;  // of And, Not and large classes
    std::unordered_map<int32_t, ByteEdges> classes_;
};

}  // namespace stemma
