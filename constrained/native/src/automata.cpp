// The C interface, the limits and the checks of what comes in.
#include "automata.h"

#include <time.h>

#include <cstring>
#include <memory>
#include <new>

namespace stemma {
namespace {

constexpr size_t kMaxWords = size_t{1} << 25;  // 128 MiB
constexpr int32_t kHeaderWords = 4, kNodeWords = 4;

void require(bool holds) {
    if (!holds) throw Failure{Code::malformed};
}

void check_range(int64_t first, int64_t count, int64_t size) {
    require(first >= 0 && count >= 0 && first + count <= size);
}

}  // namespace

double thread_cpu_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Budget::check_nfa(size_t num_states) const {
    if (static_cast<int64_t>(num_states) > max_nfa_states) throw Failure{Code::nfa_states};
    if (num_states % 4096 == 0) check_time();
}

void Budget::check_dfa(size_t num_states) const {
    if (static_cast<int64_t>(num_states) > max_states) throw Failure{Code::states};
    if (num_states % 64 == 0) check_time();
}

void Budget::check_memory(size_t num_words) const {
    if (num_words > kMaxWords) throw Failure{Code::memory};
}

void Budget::check_time() const {
    if (thread_cpu_s() > ends_at) throw Failure{Code::time};
}

GrammarTable::GrammarTable(const int32_t* words, int64_t num_words) {
    require(num_words >= kHeaderWords);
    num_nodes = words[0], num_rules = words[1], start = words[2];
    const int64_t num_payload = words[3];
    require(num_nodes > 0 && num_rules >= 0 && num_payload >= 0);
    const int64_t after_nodes = kHeaderWords + int64_t{kNodeWords} * num_nodes;
    require(after_nodes + num_rules + num_payload == num_words);
    nodes = reinterpret_cast<const Node*>(words + kHeaderWords);
    rule_roots = words + after_nodes;
    payload = rule_roots + num_rules;
    const auto is_node = [&](int64_t node) { return node >= 0 && node < num_nodes; };
    require(is_node(start));
    for (int32_t rule = 0; rule < num_rules; ++rule)
        require(rule_roots[rule] == -1 || is_node(rule_roots[rule]));
    for (int32_t index = 0; index < num_nodes; ++index) {
        const Node& node = nodes[index];
        switch (node.kind) {
            case Kind::literal:
                check_range(node.a, node.b, num_payload);
                for (int32_t i = 0; i < node.b; ++i) check_range(items(node)[i], 1, 256);
                break;
            case Kind::chars:
                require(node.b <= 0x110000);
                check_range(node.a, int64_t{2} * node.b, num_payload);
                for (int32_t i = 0, past = 0; i < node.b; ++i) {
                    const int32_t low = items(node)[2 * i], high = items(node)[2 * i + 1];
                    require(low >= past && low <= high && high <= 0x10FFFF);
                    require(high < 0xD800 || low > 0xDFFF);
                    past = high + 1;
                }
                break;
            case Kind::concat:
            case Kind::alt:
            case Kind::conjunction:
                check_range(node.a, node.b, num_payload);
                for (int32_t i = 0; i < node.b; ++i) require(is_node(items(node)[i]));
                break;
            case Kind::repeat:
                require(is_node(node.a) && node.b >= 0 && (node.c == -1 || node.c >= node.b));
                break;
            case Kind::negation:
                require(is_node(node.a));
                break;
            case Kind::ref:
                check_range(node.a, 1, num_rules);
                break;
            default:
                require(false);
        }
    }
}

}  // namespace stemma

using stemma::Budget;
using stemma::Code;
using stemma::Dfa;

// `outcome` gets the code and its detail. Returns the automaton, to be freed, or null.
extern "C" Dfa* stemma_build_automaton(
    const int32_t* words, int64_t num_words, int64_t max_nfa_states, int64_t max_states,
    double max_cpu_s, int32_t* outcome
) {
    try {
        const Budget budget{max_nfa_states, max_states, stemma::thread_cpu_s() + max_cpu_s};
        const stemma::GrammarTable table(words, num_words);
        auto dfa = std::make_unique<Dfa>(stemma::Construction(table, budget).run());
        outcome[0] = static_cast<int32_t>(Code::ok);
        outcome[1] = 0;
        return dfa.release();
    } catch (const stemma::Failure& failure) {
        outcome[0] = static_cast<int32_t>(failure.code);
        outcome[1] = failure.detail;
    } catch (const std::exception&) {
        outcome[0] = static_cast<int32_t>(Code::memory);
        outcome[1] = 0;
    }
    return nullptr;
}

// `sizes`: number of states, number of classes, start.
extern "C" void stemma_automaton_sizes(const Dfa* dfa, int32_t* sizes) {
    sizes[0] = dfa->num_states();
    sizes[1] = dfa->num_classes;
    sizes[2] = dfa->start;
}

extern "C" void stemma_copy_automaton(
    const Dfa* dfa, uint8_t* class_of, int32_t* transitions, uint8_t* accepting
) {
    std::memcpy(class_of, dfa->class_of.data(), 256);
    std::memcpy(transitions, dfa->transitions.data(), dfa->transitions.size() * sizeof(int32_t));
    std::memcpy(accepting, dfa->accepting.data(), dfa->accepting.size());
}

extern "C" void stemma_free_automaton(Dfa* dfa) { delete dfa; }
