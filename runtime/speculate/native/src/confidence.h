// How likely a drafted token is right, given that those before it are: learnt from what became of
// earlier ones.
#pragma once

#include <array>
#include <cmath>
#include <unordered_map>

#include "texts.h"

namespace stemma {

// What a draft's token rests on: a cell of the table of confidences.
struct Evidence {
    static constexpr int kNumLengths = 7, kNumShares = 6, kNumPlaces = 2;
    static constexpr int kScopeBits = 8, kNumCells = kNumScopes << kScopeBits;
    static_assert(kNumLengths * kNumShares * kNumPlaces <= 1 << kScopeBits);

    // `length` of the longest match among the voters; `share` of the votes, in (0, 1]; `index` in
    // the draft.
    static int32_t cell(Scope scope, int length, float share, bool is_lone, int index) {
        const int of_length = length < 5 ? length - 1 : length <= 8 ? 4 : length <= 16 ? 5 : 6;
        const int of_share = is_lone ? 5 : std::min(4, static_cast<int>(share * 5));
        return scope << kScopeBits |
               ((of_length * kNumShares + of_share) * kNumPlaces + (index > 0));
    }
};

// Fading counts of each cell, over all texts.
class ConfidenceTable {
  public:
    ConfidenceTable() {
        for (int32_t cell = 0; cell < Evidence::kNumCells; ++cell) {
            const float prior = prior_of(cell);
            cells_[cell] = {prior * kPriorWeight, kPriorWeight};
        }
    }

    float of(int32_t cell) const { return cells_[cell].right / cells_[cell].seen; }

    void note(int32_t cell, bool is_right) {
        Counts& counts = cells_[cell];
        counts.right = counts.right * kFade + static_cast<float>(is_right);
        counts.seen = counts.seen * kFade + 1;
    }

  private:
    static constexpr float kPriorWeight = 8, kFade = 0.995f;
    struct Counts {
        float right, seen;
    };

    // A logistic fit to drafts for the embedded model's calls (bench/speculation/drafting.py).
    static float prior_of(int32_t cell) {
        static constexpr float kScopes[] = {0.7f, 0.7f, 0.4f, -1};
        static constexpr float kLengths[] = {-0.6f, -0.2f, -0.2f, -0.1f, 0, 0, 1};
        static constexpr float kShares[] = {-1.9f, -1.4f, -0.5f, 0.4f, 2, 1};
        static constexpr float kPlaces[] = {0, -0.4f};
        const int scope = cell >> Evidence::kScopeBits;
        const int rest = cell & ((1 << Evidence::kScopeBits) - 1);
        const int place = rest % Evidence::kNumPlaces, voters = rest / Evidence::kNumPlaces;
        const int share = voters % Evidence::kNumShares;
        const int length = std::min(voters / Evidence::kNumShares, Evidence::kNumLengths - 1);
        const float logit = kScopes[scope] + kLengths[length] + kShares[share] + kPlaces[place];
        return 1 / (1 + std::exp(-logit));
    }

    std::array<Counts, Evidence::kNumCells> cells_;
};

// Accepted over predicted, for the calls of one op of one namespace: where drafts are wrong, it is
// small after a few. It fades with every proposal, so that an op whose drafts are never tried has
// another chance.
class Correction {
  public:
    float ratio() const { return (right_ + kPriorWeight) / (predicted_ + kPriorWeight); }

    void fade() {
        right_ *= kFade;
        predicted_ *= kFade;
    }

    void note(float predicted, bool is_right) {
        predicted_ += predicted;
        right_ += static_cast<float>(is_right);
    }

  private:
    static constexpr float kPriorWeight = 2, kFade = 0.98f;
    float right_ = 0, predicted_ = 0;
};

// One for each place, as far as there is room: ops whose hashes are equal share theirs.
class Corrections {
  public:
    Correction& of(const Place& place) {
        const uint64_t hash = ContextHashes::mixed(ContextHashes::mixed(0, place.name_space),
                                                   place.op);
        return table_[hash >> 54];
    }

  private:
    std::array<Correction, 1024> table_;
};

}  // namespace stemma
