// Hopcroft's minimisation on the live transitions only, in the form of A. Valmari, "Fast brief
// practical DFA minimization" (2012): O(m log n) for m transitions between n states.
#include <algorithm>
#include <map>

#include "automata.h"

namespace stemma {
namespace {

constexpr size_t kWordsPerTransition = 8;

// Elements 0 .. n-1 in disjoint sets, each a stretch of one array; marked elements come first.
class Partition {
  public:
    explicit Partition(int32_t size)
        : elements(size), set_of(size, 0), place_(size) {
        for (int32_t i = 0; i < size; ++i) elements[i] = place_[i] = i;
        if (size > 0) add_set(0, size);
    }

    int32_t num_sets() const { return static_cast<int32_t>(first.size()); }

    // Begin with one set for each key; `keys` is indexed by element.
    void divide(const std::vector<uint8_t>& keys) {
        std::stable_sort(elements.begin(), elements.end(),
                         [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
        first.clear(), past.clear(), num_marked_.clear();
        for (int32_t i = 0; i < static_cast<int32_t>(elements.size()); ++i) {
            if (i == 0 || keys[elements[i]] != keys[elements[i - 1]]) add_set(i, i);
            past.back() = i + 1;
            set_of[elements[i]] = num_sets() - 1;
            place_[elements[i]] = i;
        }
    }

    void mark(int32_t element) {
        const int32_t set = set_of[element], from = place_[element];
        const int32_t to = first[set] + num_marked_[set];
        if (from < to) return;
        elements[from] = elements[to];
        place_[elements[from]] = from;
        elements[to] = element;
        place_[element] = to;
        if (num_marked_[set]++ == 0) touched_.push_back(set);
    }

    // The smaller of the marked and the unmarked part of each touched set becomes a new set.
    void split() {
        for (; !touched_.empty(); touched_.pop_back()) {
            const int32_t set = touched_.back(), middle = first[set] + num_marked_[set];
            num_marked_[set] = 0;
            if (middle == past[set]) continue;
            if (middle - first[set] <= past[set] - middle) {
                add_set(first[set], middle);
                first[set] = middle;
            } else {
                add_set(middle, past[set]);
                past[set] = middle;
            }
            for (int32_t i = first.back(); i < past.back(); ++i)
                set_of[elements[i]] = num_sets() - 1;
        }
    }

    std::vector<int32_t> elements, set_of;  // set_of: of each element
    std::vector<int32_t> first, past;       // of each set, in `elements`

  private:
    void add_set(int32_t from, int32_t to) {
        first.push_back(from);
        past.push_back(to);
        num_marked_.push_back(0);
    }

    std::vector<int32_t> place_, num_marked_, touched_;
};

struct Transitions {
    std::vector<int32_t> from, to;
    std::vector<uint8_t> byte_class;
};

// Transitions by where they end: those into state s are order[first[s] .. first[s + 1]).
struct Incoming {
    Incoming(const std::vector<int32_t>& to, int32_t num_states)
        : first(num_states + 1, 0), order(to.size()) {
        for (const int32_t state : to) ++first[state + 1];
        for (int32_t state = 0; state < num_states; ++state) first[state + 1] += first[state];
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (size_t i = 0; i < to.size(); ++i) order[next[to[i]]++] = static_cast<int32_t>(i);
    }
    std::vector<int32_t> first, order;
};

// Whether an accepting state can be reached from each state.
std::vector<uint8_t> live_states(const Dfa& dfa) {
    std::vector<int32_t> from, to;
    for (int32_t state = 0; state < dfa.num_states(); ++state) {
        const int32_t* row = dfa.row(state);
        for (int32_t c = 0; c < dfa.num_classes; ++c) {
            if (row[c] == kDead || (c > 0 && row[c] == row[c - 1])) continue;
            from.push_back(state);
            to.push_back(row[c]);
        }
    }
    const Incoming incoming(to, dfa.num_states());
    std::vector<uint8_t> is_live(dfa.accepting);
    std::vector<int32_t> pending;
    for (int32_t state = 0; state < dfa.num_states(); ++state)
        if (is_live[state]) pending.push_back(state);
    while (!pending.empty()) {
        const int32_t state = pending.back();
        pending.pop_back();
        for (int32_t i = incoming.first[state]; i < incoming.first[state + 1]; ++i) {
            const int32_t source = from[incoming.order[i]];
            if (is_live[source]) continue;
            is_live[source] = 1;
            pending.push_back(source);
        }
    }
    return is_live;
}

// Blocks of live states that accept the same texts; `number` is that of each live state.
Partition blocks(const Dfa& dfa, const std::vector<int32_t>& states,
                 const std::vector<int32_t>& number, const Budget& budget) {
    const auto num_states = static_cast<int32_t>(states.size());
    Transitions live;
    for (int32_t i = 0; i < num_states; ++i) {
        const int32_t* row = dfa.row(states[i]);
        for (int32_t c = 0; c < dfa.num_classes; ++c) {
            if (number[row[c]] < 0) continue;
            live.from.push_back(i);
            live.to.push_back(number[row[c]]);
            live.byte_class.push_back(static_cast<uint8_t>(c));
        }
    }
    budget.check_memory(kWordsPerTransition * live.to.size());
    const Incoming incoming(live.to, num_states);
    Partition found(num_states);
    for (int32_t i = 0; i < num_states; ++i)
        if (dfa.accepting[states[i]]) found.mark(i);
    found.split();
    Partition cords(static_cast<int32_t>(live.to.size()));
    cords.divide(live.byte_class);
    for (int32_t cord = 0, block = 1; cord < cords.num_sets(); ++cord) {
        if (cord % 256 == 0) budget.check_time();
        for (int32_t i = cords.first[cord]; i < cords.past[cord]; ++i)
            found.mark(live.from[cords.elements[i]]);
        found.split();
        for (; block < found.num_sets(); ++block) {
            for (int32_t i = found.first[block]; i < found.past[block]; ++i) {
                const int32_t state = found.elements[i];
                for (int32_t j = incoming.first[state]; j < incoming.first[state + 1]; ++j)
                    cords.mark(incoming.order[j]);
            }
            cords.split();
        }
    }
    return found;
}

// Gives every class of bytes that behave alike in all states one column, by its first byte.
void merge_classes(Dfa& dfa) {
    const int32_t num_states = dfa.num_states();
    std::map<std::vector<int32_t>, int32_t> merged;
    std::vector<int32_t> class_of(dfa.num_classes), kept;
    std::vector<int32_t> column(num_states);
    for (int32_t c = 0; c < dfa.num_classes; ++c) {
        for (int32_t state = 0; state < num_states; ++state) column[state] = dfa.row(state)[c];
        const auto [known, is_new] = merged.try_emplace(column, static_cast<int32_t>(kept.size()));
        if (is_new) kept.push_back(c);
        class_of[c] = known->second;
    }
    std::vector<int32_t> transitions;
    transitions.reserve(kept.size() * num_states);
    for (int32_t state = 0; state < num_states; ++state)
        for (const int32_t c : kept) transitions.push_back(dfa.row(state)[c]);
    for (auto& c : dfa.class_of) c = static_cast<uint8_t>(class_of[c]);
    dfa.transitions = std::move(transitions);
    dfa.num_classes = static_cast<int32_t>(kept.size());
}

}  // namespace

// States are numbered from the start, breadth first: equal languages give equal automata.
Dfa minimal(const Dfa& dfa, const Budget& budget) {
    const std::vector<uint8_t> is_live = live_states(dfa);
    std::vector<int32_t> states, number(dfa.num_states(), -1);
    for (int32_t state = 0; state < dfa.num_states(); ++state) {
        if (!is_live[state]) continue;
        number[state] = static_cast<int32_t>(states.size());
        states.push_back(state);
    }
    Dfa result;
    result.class_of = dfa.class_of;
    result.num_classes = dfa.num_classes;
    result.accepting = {0};
    result.transitions.assign(dfa.num_classes, kDead);
    if (is_live[dfa.start]) {
        const Partition found = blocks(dfa, states, number, budget);
        std::vector<int32_t> state_of(found.num_sets(), kDead), order;
        const auto reach = [&](int32_t live) {
            int32_t& state = state_of[found.set_of[live]];
            if (state == kDead) {
                order.push_back(live);
                state = static_cast<int32_t>(order.size());
            }
            return state;
        };
        result.start = reach(number[dfa.start]);
        for (size_t at = 0; at < order.size(); ++at) {
            const int32_t* row = dfa.row(states[order[at]]);
            for (int32_t c = 0; c < dfa.num_classes; ++c)
                result.transitions.push_back(number[row[c]] < 0 ? kDead : reach(number[row[c]]));
            result.accepting.push_back(dfa.accepting[states[order[at]]]);
        }
    }
    merge_classes(result);
    return result;
}

}  // namespace stemma
