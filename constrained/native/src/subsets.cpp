// Subset construction and products, both over the reachable states only.
#include <algorithm>

#include "automata.h"
#include "set_table.h"

namespace stemma {
namespace {

class Subsets {
  public:
    Subsets(const Nfa& nfa, const Budget& budget)
        : nfa_(nfa), budget_(budget), sets_(budget), moved_(budget),
          of_single_(nfa.first_edge.size(), -1), seen_in_(nfa.first_edge.size(), 0) {}

    Dfa run() {
        set_classes();
        sets_.intern({});  // the dead state
        targets_ = {kStart};
        dfa_.start = target_of();
        for (int32_t state = 0; state < sets_.size(); ++state) add_row(state);
        return std::move(dfa_);
    }

  private:
    struct ClassEdge {
        int32_t low, high, to;  // classes
    };

    // Bytes that no edge tells apart are one class; classes ascend with their bytes.
    void set_classes() {
        std::array<bool, 257> is_cut{};
        for (const auto& edge : nfa_.edges) is_cut[edge.low] = is_cut[edge.high + 1] = true;
        int32_t index = 0;
        for (int32_t byte = 0; byte < 256; ++byte) {
            if (byte > 0 && is_cut[byte]) ++index;
            dfa_.class_of[byte] = static_cast<uint8_t>(index);
        }
        dfa_.num_classes = index + 1;
    }

    void add_row(int32_t state) {
        const size_t row = dfa_.transitions.size();
        dfa_.transitions.resize(row + dfa_.num_classes, kDead);
        dfa_.accepting.push_back(
            std::binary_search(sets_.begin(state), sets_.end(state), kAccept)
        );
        edges_.clear();
        for (const int32_t* at = sets_.begin(state); at != sets_.end(state); ++at)
            for (int32_t i = nfa_.first_edge[*at]; i >= 0; i = nfa_.edges[i].next) {
                const auto& edge = nfa_.edges[i];
                edges_.push_back({dfa_.class_of[edge.low], dfa_.class_of[edge.high], edge.to});
            }
        if (edges_.size() > 1) {
            std::sort(edges_.begin(), edges_.end(), [](const ClassEdge& a, const ClassEdge& b) {
                return a.low < b.low;
            });
        }
        fill_row(row);
    }

    // Sweeps over the classes; between two ends of edges all classes have one target.
    void fill_row(size_t row) {
        active_.clear();
        size_t next = 0;
        int32_t low = 0;
        while (next < edges_.size() || !active_.empty()) {
            if (active_.empty()) low = edges_[next].low;
            while (next < edges_.size() && edges_[next].low <= low)
                active_.push_back(edges_[next++]);
            int32_t high = next < edges_.size() ? edges_[next].low - 1 : dfa_.num_classes - 1;
            for (const auto& edge : active_) high = std::min(high, edge.high);
            targets_.clear();
            for (const auto& edge : active_) targets_.push_back(edge.to);
            const int32_t target = target_of();
            std::fill_n(dfa_.transitions.begin() + static_cast<int64_t>(row) + low, high - low + 1,
                        target);
            active_.erase(
                std::remove_if(active_.begin(), active_.end(),
                               [&](const ClassEdge& edge) { return edge.high <= high; }),
                active_.end()
            );
            low = high + 1;
        }
    }

    // The state of the closure of `targets_`; remembered by the targets themselves.
    int32_t target_of() {
        if (targets_.size() == 1) {
            int32_t& known = of_single_[targets_[0]];
            if (known < 0) known = closed();
            return known;
        }
        std::sort(targets_.begin(), targets_.end());
        targets_.erase(std::unique(targets_.begin(), targets_.end()), targets_.end());
        const int32_t moved = moved_.intern(targets_);
        if (moved == static_cast<int32_t>(of_moved_.size())) of_moved_.push_back(closed());
        return of_moved_[moved];
    }

    int32_t closed() {
        ++round_;
        pending_.clear();
        closure_.clear();
        for (const int32_t target : targets_) reach(target);
        while (!pending_.empty()) {
            const int32_t state = pending_.back();
            pending_.pop_back();
            for (int32_t i = nfa_.first_move[state]; i >= 0; i = nfa_.moves[i].next)
                reach(nfa_.moves[i].to);
        }
        std::sort(closure_.begin(), closure_.end());
        const int32_t set = sets_.intern(closure_);
        budget_.check_dfa(static_cast<size_t>(set) + 1);
        return set;
    }

    void reach(int32_t state) {
        if (seen_in_[state] == round_) return;
        seen_in_[state] = round_;
        if (nfa_.first_move[state] >= 0) pending_.push_back(state);
        if (nfa_.first_edge[state] >= 0 || state == kAccept) closure_.push_back(state);
    }

    const Nfa& nfa_;
    const Budget& budget_;
    SetTable sets_, moved_;
    std::vector<int32_t> of_single_, of_moved_;
    std::vector<uint32_t> seen_in_;
    uint32_t round_ = 0;
    std::vector<ClassEdge> edges_, active_;
    std::vector<int32_t> targets_, pending_, closure_;
    Dfa dfa_;
};

}  // namespace

Dfa subsets(const Nfa& nfa, const Budget& budget) { return Subsets(nfa, budget).run(); }

Dfa product(const Dfa& a, const Dfa& b, bool is_difference, const Budget& budget) {
    Dfa result;
    std::vector<std::array<int32_t, 2>> classes;
    std::unordered_map<int32_t, int32_t> class_of_pair;
    for (int32_t byte = 0; byte < 256; ++byte) {
        const int32_t pair = a.class_of[byte] << 8 | b.class_of[byte];
        const auto [known, is_new] =
            class_of_pair.try_emplace(pair, static_cast<int32_t>(classes.size()));
        if (is_new) classes.push_back({a.class_of[byte], b.class_of[byte]});
        result.class_of[byte] = static_cast<uint8_t>(known->second);
    }
    result.num_classes = static_cast<int32_t>(classes.size());
    std::unordered_map<uint64_t, int32_t> state_of;
    std::vector<std::array<int32_t, 2>> pairs;
    const auto state = [&](int32_t left, int32_t right) {
        if (left == kDead || (right == kDead && !is_difference)) left = right = kDead;
        const auto key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
        const auto [known, is_new] = state_of.try_emplace(key, static_cast<int32_t>(pairs.size()));
        if (is_new) {
            pairs.push_back({left, right});
            budget.check_dfa(pairs.size());
        }
        return known->second;
    };
    state(kDead, kDead);
    result.start = state(a.start, b.start);
    for (size_t at = 0; at < pairs.size(); ++at) {
        const auto [left, right] = pairs[at];
        for (const auto& [of_a, of_b] : classes)
            result.transitions.push_back(state(a.row(left)[of_a], b.row(right)[of_b]));
        result.accepting.push_back(a.accepting[left] && (b.accepting[right] != 0) != is_difference);
    }
    return result;
}

}  // namespace stemma
