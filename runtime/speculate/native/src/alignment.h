// Which words of two texts stand for each other: alignment by dynamic programming (Needleman and
// Wunsch 1970), its score by how much words weigh. O(words of one x words of the other).
#pragma once

#include "examples.h"

namespace stemma {

constexpr float kGap = 0.6f;       // what a word costs that has no counterpart, times its weight
constexpr float kSameKind = 0.5f;  // that has another one of its kind
constexpr float kOtherKind = 1.0f;

// Two texts, or their beginnings, from their first words on; `step` -1: read backwards.
//
// A row is done in two passes, so that one cell waits for the one before it only as long as a
// maximum takes: with gaps summed up along the row, score + sum never falls from left to right.
class Alignment {
  public:
    void run(const Word* one, const float* one_weights, int num_one, const Word* other,
             const float* other_weights, int num_other, int step) {
        width_ = num_other + 1;
        const size_t num_cells = static_cast<size_t>(num_one + 1) * width_;
        if (scores_.size() < num_cells) scores_.resize(num_cells), moves_.resize(num_cells);
        read(other, other_weights, num_other, step);
        for (int j = 0; j <= num_other; ++j) scores_[j] = -gaps_[j], moves_[j] = kOther;
        for (int i = 1; i <= num_one; ++i)
            fill_row(i, one[step * (i - 1)], one_weights[step * (i - 1)], num_other);
    }

    // With i words of the one and j of the other.
    float score(int i, int j) const { return scores_[static_cast<size_t>(i) * width_ + j]; }

    // Calls `pair` with each two indices that stand for each other, the last first.
    template <typename Pair>
    void trace(int i, int j, Pair pair) const {
        while (i || j) {
            const Move move = moves_[static_cast<size_t>(i) * width_ + j];
            if (move == kBoth) pair(i - 1, j - 1);
            i -= move != kOther, j -= move != kOne;
        }
    }

  private:
    enum Move : uint8_t { kBoth, kOne, kOther };

    void read(const Word* other, const float* weights, int num_other, int step) {
        ids_.resize(num_other), kinds_.resize(num_other), weights_.resize(num_other);
        gaps_.resize(num_other + 1);
        for (int j = 0; j < num_other; ++j) {
            ids_[j] = other[step * j].id, kinds_[j] = other[step * j].kind;
            weights_[j] = weights[step * j];
            gaps_[j + 1] = gaps_[j] + kGap * weights_[j];
        }
    }

    void fill_row(int i, const Word word, const float weight, const int num_other) {
        float* __restrict const scores = &scores_[static_cast<size_t>(i) * width_];
        const float* __restrict const above = scores - width_;
        Move* __restrict const moves = &moves_[static_cast<size_t>(i) * width_];
        const int32_t *const ids = ids_.data(), *const kinds = kinds_.data();
        const float *const weights = weights_.data(), *const gaps = gaps_.data();
        const int32_t id = word.id, kind = word.kind == kMark ? -1 : word.kind;
        const float gap = kGap * weight;
        scores[0] = above[0] - gap, moves[0] = kOne;
        for (int j = 0; j < num_other; ++j) {
            const float cost = std::max(weight, weights[j]);
            const float other = cost * (kinds[j] == kind ? -kSameKind : -kOtherKind);
            const float both = above[j] + (ids[j] == id ? weights[j] : other);
            const float without = above[j + 1] - gap;
            scores[j + 1] = std::max(both, without);
            moves[j + 1] = without > both ? kOne : kBoth;
        }
        float most = scores[0];
        for (int j = 1; j <= num_other; ++j) {
            const float sum = scores[j] + gaps[j];
            moves[j] = most > sum ? kOther : moves[j];
            most = std::max(most, sum);
            scores[j] = most - gaps[j];
        }
    }

    int width_ = 1;
    std::vector<float> scores_;
    std::vector<Move> moves_;
    std::vector<int32_t> ids_, kinds_;  // of the other text
    std::vector<float> weights_, gaps_;
};

}  // namespace stemma
