// Drafts from texts: what followed where a text's end has occurred before, put to the vote, after
// SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt lookup (Saxena 2023). Hash chains
// take the place of its suffix trees: no node is split, and the oldest goes by being overwritten.

#include <cmath>
#include <cstring>
#include <limits>

#include "confidence.h"
#include "history.h"
#include "own_index.h"

namespace stemma {
namespace {

constexpr float kMaxConfidence = 0.99f;
constexpr int kMaxDraft = 64;

// A vote's weight, by the witness and by how much has matched (tuned with
// bench/speculation/drafting.py).
struct Weights {
    float of[kNumScopes][kMaxMatch + kMaxDraft + 1];

    Weights() {
        constexpr float kScopes[kNumScopes] = {16, 2, 1.5f, 1};
        for (int scope = 0; scope < kNumScopes; ++scope)
            for (int length = 0; length <= kMaxMatch + kMaxDraft; ++length)
                of[scope][length] = kScopes[scope] * std::pow(1.5f, std::min(length, 16));
    }
};
const Weights kWeights;

// The token that the matches propose, and on what evidence.
struct Verdict {
    int32_t token;
    int32_t cell;

    Verdict(const Matches& matches, int index) {
        struct Party {
            int32_t token;
            float votes, best_vote;
            const Match* best;
        } parties[kNumScopes * Matches::kMaxFound];
        int num_parties = 0;
        float all_votes = 0;
        for (int i = 0; i < matches.num_found; ++i) {
            const Match& match = matches.found[i];
            const float vote = kWeights.of[match.scope][match.length];
            all_votes += vote;
            int at = 0;
            while (at < num_parties && parties[at].token != *match.next) ++at;
            Party& party = parties[at];
            if (at == num_parties) {
                parties[num_parties++] = {*match.next, vote, vote, &match};
                continue;
            }
            party.votes += vote;
            if (vote > party.best_vote) party.best_vote = vote, party.best = &match;
        }
        const Party& winner =
            *std::max_element(parties, parties + num_parties,
                              [](const Party& a, const Party& b) { return a.votes < b.votes; });
        token = winner.token;
        cell = Evidence::cell(winner.best->scope, winner.best->length, winner.votes / all_votes,
                              matches.num_found == 1, index);
    }
};

class Drafter {
  public:
    Drafter(int64_t max_bytes, int32_t scopes, int32_t max_match, float min_survival)
        : scopes_(scopes),
          max_match_(max_match),
          min_survival_(min_survival),
          history_(bits_of(scopes & ~(1 << kOwn) ? max_bytes : 0), max_bytes / 4) {}

    int32_t open(const Place& place, const int32_t* prompt, int64_t num_prompt) {
        const int32_t id = history_.open(place, prompt, num_prompt);
        if (static_cast<size_t>(id) >= own_.size()) own_.resize(id + 1);
        return id;
    }

    void extend(int32_t id, const int32_t* tokens, int64_t num_tokens) {
        history_.extend(id, tokens, num_tokens, scopes_);
    }

    void close(int32_t id) {
        own_[id].reset();
        history_.close(id);
    }

    // At most `room` tokens that may follow the text and `tail`.
    int32_t propose(int32_t id, const int32_t* tail, int64_t num_tail, int32_t room,
                    int32_t* tokens, float* confidences, int32_t* cells) {
        if (scopes_ >> kOwn & 1) read_own(id);
        Correction& correction = corrections_.of(history_.at(id).place);
        correction.fade();
        int32_t context[kMaxMatch + kMaxDraft];
        int32_t* end = last_tokens(history_.at(id), tail, num_tail, context);
        Matches matches(max_match_);
        float survival = 1;
        int32_t num_drafted = 0;
        for (room = std::min(room, kMaxDraft); num_drafted < room; ++num_drafted) {
            if (matches.num_found == 0) find(id, context, end, matches);
            if (matches.num_found == 0) break;
            const Verdict verdict(matches, num_drafted);
            const float confidence =
                std::min(kMaxConfidence, table_.of(verdict.cell) * correction.ratio());
            survival *= confidence;
            if (survival < min_survival_) break;
            *end++ = tokens[num_drafted] = verdict.token;
            confidences[num_drafted] = confidence;
            cells[num_drafted] = verdict.cell;
            keep(verdict.token, matches);
        }
        return num_drafted;
    }

    // Of the tokens that rested on `cells`, the first `num_accepted` were right, the next was not.
    void note(int32_t id, const int32_t* cells, int32_t num_verified, int32_t num_accepted) {
        Correction& correction = corrections_.of(history_.at(id).place);
        for (int32_t i = 0; i < num_verified && i <= num_accepted; ++i) {
            correction.note(table_.of(cells[i]), i < num_accepted);
            table_.note(cells[i], i < num_accepted);
        }
    }

    void describe(int64_t* counts) const {
        int64_t num_open = 0, num_closed = 0, open_bytes = 0;
        for (size_t id = 0; id < history_.texts().size(); ++id) {
            const auto& text = history_.texts()[id];
            if (!text.is_used) continue;
            ++(text.is_open ? num_open : num_closed);
            if (text.is_open) open_bytes += text.num_bytes();
            if (own_[id]) open_bytes += own_[id]->num_bytes();
        }
        const int64_t found[] = {num_open, num_closed, history_.num_entries(), open_bytes,
                                 history_.num_table_bytes() + history_.num_text_bytes()};
        std::memcpy(counts, found, sizeof found);
    }

  private:
    // Of the number of entries: three quarters of the bytes are for the tables, the rest is for the
    // texts.
    static int bits_of(int64_t max_bytes) {
        int bits = 4;
        while (int64_t{History::kEntryBytes} << (bits + 1) <= max_bytes / 4 * 3) ++bits;
        return bits;
    }

    void read_own(int32_t id) {
        if (!own_[id]) own_[id] = std::make_unique<OwnIndex>();
        own_[id]->read(history_.at(id));
    }

    // As many as are compared, into `context`; returns their end.
    static int32_t* last_tokens(const Text& text, const int32_t* tail, int64_t num_tail,
                                int32_t* context) {
        const int64_t of_tail = std::min<int64_t>(num_tail, kMaxMatch);
        const int64_t of_text =
            std::min<int64_t>(text.end() - text.begin(), kMaxMatch - of_tail);
        int32_t* end = std::copy(text.end() - of_text, text.end(), context);
        return std::copy(tail + num_tail - of_tail, tail + num_tail, end);
    }

    void find(int32_t id, const int32_t* begin, const int32_t* end, Matches& matches) const {
        matches.seek(begin, end);
        if (own_[id]) own_[id]->find(history_.at(id), matches);
        for (int32_t scope = kProgram; scope < kNumScopes; ++scope)
            if (scopes_ >> scope & 1)
                history_.find(id, static_cast<Scope>(scope), scopes_, matches);
    }

    // Leave the matches that agree with the draft and go on.
    static void keep(int32_t token, Matches& matches) {
        const int num_found = matches.num_found;
        matches.num_found = 0;
        for (int i = 0; i < num_found; ++i) {
            const Match& match = matches.found[i];
            if (*match.next == token && match.next + 1 < match.end)
                matches.found[matches.num_found++] = {match.next + 1, match.end, match.length + 1,
                                                      match.scope};
        }
    }

    const int32_t scopes_, max_match_;  // a bit for each scope that may be used
    const float min_survival_;          // drafts end before the chance to be reached is smaller
    History history_;
    std::vector<std::unique_ptr<OwnIndex>> own_;  // by text
    ConfidenceTable table_;
    Corrections corrections_;
};

}  // namespace
}  // namespace stemma

using stemma::Drafter;

extern "C" Drafter* stemma_new_drafter(int64_t max_bytes, int32_t scopes, int32_t max_match,
                                       float min_survival) {
    return new Drafter(max_bytes, scopes, max_match, min_survival);
}

extern "C" void stemma_free_drafter(Drafter* drafter) { delete drafter; }

extern "C" int32_t stemma_open_text(Drafter* drafter, const stemma::Place* place,
                                    const int32_t* prompt, int64_t num_prompt) {
    return drafter->open(*place, prompt, num_prompt);
}

extern "C" void stemma_extend_text(Drafter* drafter, int32_t text, const int32_t* tokens,
                                   int64_t num_tokens) {
    drafter->extend(text, tokens, num_tokens);
}

extern "C" void stemma_close_text(Drafter* drafter, int32_t text) { drafter->close(text); }

// Into three arrays of `room`; returns how many tokens were drafted.
extern "C" int32_t stemma_propose(Drafter* drafter, int32_t text, const int32_t* tail,
                                  int64_t num_tail, int32_t room, int32_t* tokens,
                                  float* confidences, int32_t* cells) {
    return drafter->propose(text, tail, num_tail, room, tokens, confidences, cells);
}

extern "C" void stemma_note_draft(Drafter* drafter, int32_t text, const int32_t* cells,
                                  int32_t num_verified, int32_t num_accepted) {
    drafter->note(text, cells, num_verified, num_accepted);
}

// Into `counts` [5]: open and closed texts, entries, bytes of the open texts and of the history.
extern "C" void stemma_describe_drafter(const Drafter* drafter, int64_t* counts) {
    drafter->describe(counts);
}
