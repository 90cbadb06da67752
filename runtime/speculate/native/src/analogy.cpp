// What a text will be by analogy with earlier ones: prompts and outputs are aligned; what stands
// between equal words is a slot, and an example's rest with its slots exchanged is a guess. Slots
// between delimiters: wrapper induction (Kushmerick 1997); here each example is a wrapper.
//
//     example   ... What is 12 times 7 ? | I need to multiply 12 by 7 .  | calculator [ 12 * 7 ]
//                   =====+==+==+=====+=    ====================+==+==+=
//     new       ... What is 41 times 9 ? | I need to multiply 41 by 9 .  | calculator [ 41 * 9 ]
//                                                                          (the guess)

#include "alignment.h"

namespace stemma {
namespace {

constexpr int kMaxParts = 256;      // of a guess, and as many of the next output's
constexpr int kMaxAligned = 16;     // examples of which prompts are aligned, for one guess
constexpr int kMaxValue = 8;        // words of a slot
constexpr int kMaxOccurrences = 4;  // of a word that are tried
constexpr int kMaxBefore = 4;       // words before the first equal one
constexpr int kMaxFillers = 6;      // numbers or names of a prompt that are counted
constexpr float kOutputFactor = 3;  // what output says more than prompts do
constexpr float kMinAgreed = 0.3f;  // of the output's weight
// What an exchanged word that is no name, and a slot filled by its rank, take from a score of 1.
constexpr float kWordPenalty = 0.05f, kRankPenalty = 0.02f;

// Words that say the next: word `example` of the example, in whose place words [first, last] of
// the new text are said; first -1: the example's own.
struct Part {
    int32_t example, first, last;
};

}  // namespace

// One example's guess. The parts of the output come first, then the next output's.
struct Guess {
    int64_t number;
    float score;      // 1: all of the new text is the example's
    int32_t begin;    // the first word of the example that is not said yet
    int32_t num_parts, num_next_parts;
    Part parts[2 * kMaxParts];
};

namespace {

// Numbers or runs of names of a prompt, the last first, each once, but what is said already.
struct Filler {
    int first, last;

    int size() const { return last - first + 1; }
};

bool are_equal(const Words& one, int i, const Words& other, int j, int num) {
    return std::equal(one.begin() + i, one.begin() + i + num, other.begin() + j);
}

std::vector<Filler> fillers(const Words& words, int num_prompt, int num_said, Kind kind) {
    std::vector<Filler> found;
    for (int i = num_prompt - 1; i >= 0 && found.size() < kMaxFillers; --i) {
        if (words[i].kind != kind) continue;
        Filler filler{i, i};
        if (kind == kName) {
            while (i > 0 && words[i - 1].kind == kName) --i;
            filler.first = i == 0 || words[i - 1].kind == kMark ? i + 1 : i;  // a sentence's first
        }
        if (filler.size() == 0) continue;
        bool is_new = true;
        for (int k = num_prompt; k + filler.size() <= num_said && is_new; ++k)
            is_new = !are_equal(words, k, words, filler.first, filler.size());
        for (const Filler& other : found)
            is_new = is_new && !(other.size() == filler.size() &&
                                 are_equal(words, other.first, words, filler.first, filler.size()));
        if (is_new) found.push_back(filler);
    }
    return found;
}

// How an example's prompt stands to the new one.
struct PromptAlignment {
    std::vector<int> images;  // of its words: their places in the new prompt, -1 where none
    int first, new_first;     // where the aligned parts begin
    float score;
};

// Says an example's words with its slots exchanged.
class Transfer {
  public:
    Transfer(const Examples& examples, const Example& example, const Words& words, int num_prompt,
             const PromptAlignment& prompt, std::vector<int> images, int begin)
        : examples_(examples),
          example_(example),
          words_(words),
          num_prompt_(num_prompt),
          prompt_(prompt),
          images_(std::move(images)),
          begin_(begin) {}

    int num_exchanged = 0, num_ranked = 0;  // words that are no names; slots by rank

    // Words [first, last) of the example into `parts`; returns their number, -1 where a word has
    // a slot that cannot be exchanged.
    int say(int first, int last, Part* parts) {
        int num_parts = 0;
        for (int at = first; at < last;) {
            if (num_parts == kMaxParts) return -1;
            Part& part = parts[num_parts++] = {at, -1, -1};
            const int num_words = example_.words[at].kind == kMark ? exchange_mark(at, part)
                                                                   : exchange(at, last, part);
            if (num_words == 0) return -1;
            at += num_words;
        }
        return num_parts;
    }

  private:
    bool is_anchor(int i) const {
        return images_[i] >= 0 && example_.words[i] == words_[images_[i]];
    }

    // Signs change places as words do, if outputs know them.
    int exchange_mark(int at, Part& part) const {
        for (int i = begin_ - 1; i >= prompt_.first; --i) {
            if (example_.words[i] != example_.words[at]) continue;
            const int image = images_[i];
            if (image >= 0 && !is_anchor(i) && words_[image].kind == kMark &&
                examples_.num_outputs(words_[image].id))
                part.first = part.last = image;
            break;
        }
        return 1;
    }

    // How many words of the example the part stands for; 0: one that cannot be exchanged. The
    // nearest occurrence before it says whether a word is a slot's.
    int exchange(int at, int last, Part& part) {
        const Word& word = example_.words[at];
        bool is_seen = false;
        for (int i = begin_ - 1, num_tried = 0; i >= 0 && num_tried < kMaxOccurrences; --i) {
            if (example_.words[i] != word) continue;
            if (i < prompt_.first) {
                is_seen = is_seen || word.kind != kWord;
                break;
            }
            if (is_anchor(i)) return 1;
            is_seen = true;
            ++num_tried;
            if (const int num = exchange_run(at, last, i, part)) return num;
        }
        if (!is_seen) return is_between(word) ? 0 : 1;
        if (word.kind == kNumber || (word.kind == kName && !examples_.is_template(word))) {
            if (const int num = exchange_by_rank(at, last, part)) return num;
            return 0;
        }
        return examples_.is_template(word) ? 1 : 0;
    }

    // The longest run of words that has stood at `i`, too, by what stands between its neighbours.
    int exchange_run(int at, int last, int i, Part& part) {
        int num = 1;
        while (at + num < last && i + num < begin_ && i + num != example_.num_prompt &&
               example_.words[i + num] == example_.words[at + num] && !is_anchor(i + num) &&
               example_.words[i + num].kind != kMark)
            ++num;
        for (; num > 0; --num) {
            if (!find_value(at, i, num, part)) continue;
            for (int k = 0; k < num; ++k) num_exchanged += example_.words[at + k].kind == kWord;
            return num;
        }
        return 0;
    }

    bool find_value(int at, int i, int num, Part& part) const {
        const int before = i > prompt_.first ? images_[i - 1] : prompt_.new_first - 1;
        const int behind = i + num < begin_ ? images_[i + num] : static_cast<int>(words_.size());
        if ((i > prompt_.first && before < 0) || behind < 0) return false;
        int first = before + 1, last = behind - 1;
        const Words& own = example_.words;
        if (own[at].kind == kName)
            while (first <= last && words_[first].kind == kWord) ++first;
        if (own[at + num - 1].kind == kName)
            while (first <= last && words_[last].kind == kWord) --last;
        if (first > last || last - first >= kMaxValue) return false;
        if (words_[first].kind == kMark || words_[last].kind == kMark) return false;
        if (first < num_prompt_ && last >= num_prompt_) return false;
        if (num == 1 && own[at].kind == kNumber &&
            (first != last || words_[first].kind != kNumber))
            return false;
        // Another word in a word's place is of outputs, too, or a rare one.
        if (num == 1 && own[at].kind == kWord && first == last && words_[first].kind == kWord &&
            examples_.num_texts(words_[first].id) > 1 && !examples_.num_outputs(words_[first].id))
            return false;
        part.first = first, part.last = last;
        return true;
    }

    // As the second number from the end stands for the second, whatever is around them.
    int exchange_by_rank(int at, int last, Part& part) {
        const Kind kind = example_.words[at].kind;
        const auto own = fillers(example_.words, example_.num_prompt, begin_, kind);
        const auto others =
            fillers(words_, num_prompt_, static_cast<int>(words_.size()), kind);
        for (size_t k = 0; k < std::min(own.size(), others.size()); ++k) {
            const int num = own[k].size();
            if (at + num > last || !are_equal(example_.words, at, example_.words, own[k].first, num))
                continue;
            if (kind == kName && at + num < last && example_.words[at + num].kind == kName) continue;
            if (num_prompt_ - others[k].first > 2 * (example_.num_prompt - own[k].first) + 8)
                continue;
            part.first = others[k].first, part.last = others[k].last;
            ++num_ranked;
            return num;
        }
        return 0;
    }

    // Whether a word is known only by what was appended behind the example's output.
    bool is_between(const Word& word) const {
        const auto first = example_.words.begin() + example_.num_own;
        const auto last = example_.words.begin() + example_.next_begin;
        return !examples_.is_template(word) && std::find(first, last, word) != last;
    }

    const Examples& examples_;
    const Example& example_;
    const Words& words_;  // the new text's
    const int num_prompt_;
    const PromptAlignment& prompt_;
    const std::vector<int> images_;  // of the example's words that are said
    const int begin_;
};

}  // namespace

// The text of one call, while it is said.
class Analogy {
  public:
    Analogy(Examples* examples, Words prompt)
        : examples_(*examples), words_(std::move(prompt)), num_prompt_(size()) {
        weights_ = weights_from(0);
        for (int i = 0; i < num_prompt_; ++i) {
            prompt_weight_ += weights_[i];
            float& most = weight_of_[words_[i].id];
            most = std::max(most, weights_[i]);
        }
    }

    // What follows this output, by the most alike examples, the best first; returns how many.
    int propose(const int32_t* ids, const uint8_t* kinds, int32_t num_words, Guess* guesses,
                int32_t room) {
        words_.resize(num_prompt_);
        append(words_, ids, kinds, num_words);
        weights_.resize(num_prompt_);
        float output_weight = 0;
        for (float weight : weights_from(num_prompt_)) {
            weights_.push_back(weight);
            output_weight += weight;
        }
        const float most = prompt_weight_ + kOutputFactor * output_weight + 1e-9f;
        int num_guesses = 0;
        for (const Candidate& candidate : candidates(output_weight)) {
            if (num_guesses == room) break;
            Guess& guess = guesses[num_guesses];
            if (!transfer(candidate, guess)) continue;
            guess.score += kOutputFactor * candidate.output_score / most;
            ++num_guesses;
        }
        std::sort(guesses, guesses + num_guesses,
                  [](const Guess& a, const Guess& b) { return a.score > b.score; });
        return num_guesses;
    }

  private:
    struct Candidate {
        int64_t number;
        float score;  // without an alignment of prompts
        float output_score;
        int num_output;  // words of its output that are said
    };

    int size() const { return static_cast<int>(words_.size()); }

    std::vector<float> weights_from(int first) const {
        std::vector<float> weights;
        for (int i = first; i < size(); ++i)
            weights.push_back(examples_.weight(words_[i]) * Examples::nearness(num_prompt_ - i));
        return weights;
    }

    std::vector<Candidate> candidates(float output_weight) {
        std::vector<Candidate> found;
        for (int64_t number = examples_.first(); number < examples_.end(); ++number) {
            Candidate candidate{number, 0, 0, 0};
            align_output(candidate);
            if (candidate.output_score < kMinAgreed * output_weight) continue;
            candidate.score = kOutputFactor * candidate.output_score + common_weight(number);
            found.push_back(candidate);
        }
        const auto is_better = [](const Candidate& a, const Candidate& b) {
            return a.score != b.score ? a.score > b.score : a.number > b.number;
        };
        const size_t num = std::min<size_t>(kMaxAligned, found.size());
        std::partial_sort(found.begin(), found.begin() + num, found.end(), is_better);
        found.resize(num);
        return found;
    }

    // Of the prompt's words, those that the example has, too.
    float common_weight(int64_t number) {
        if (num_weighed_ == 0) first_weighed_ = examples_.first();
        for (; first_weighed_ + num_weighed_ <= number; ++num_weighed_) {
            float& sum = common_weights_.emplace_back(0.0f);
            if (first_weighed_ + num_weighed_ < examples_.first()) continue;
            for (int32_t id : examples_.at(first_weighed_ + num_weighed_).ids) {
                const auto weight = weight_of_.find(id);
                if (weight != weight_of_.end()) sum += weight->second;
            }
        }
        return common_weights_[number - first_weighed_];
    }

    // All that is said, with the beginning of the example's output that it is most like.
    void align_output(Candidate& candidate) {
        const int num_said = size() - num_prompt_;
        if (num_said == 0) return;
        const Example& example = examples_.at(candidate.number);
        const std::vector<float>& weights = examples_.weights(candidate.number);
        const int most = std::min(example.num_own - example.num_prompt, 2 * num_said + kMaxValue);
        alignment_.run(example.words.data() + example.num_prompt,
                       weights.data() + example.num_prompt, most, words_.data() + num_prompt_,
                       weights_.data() + num_prompt_, num_said, 1);
        candidate.output_score = alignment_.score(0, num_said);
        for (int i = 1; i <= most; ++i) {
            if (alignment_.score(i, num_said) <= candidate.output_score) continue;
            candidate.output_score = alignment_.score(i, num_said);
            candidate.num_output = i;
        }
    }

    // Up to both prompts' ends; computed once.
    const PromptAlignment& align_prompt(int64_t number) {
        const auto known = prompts_.find(number);
        if (known != prompts_.end()) return known->second;
        const Example& example = examples_.at(number);
        const std::vector<float>& weights = examples_.weights(number);
        PromptAlignment prompt{std::vector<int>(example.num_prompt, -1), example.num_prompt,
                               num_prompt_, 0};
        if (example.num_prompt == 0 || num_prompt_ == 0) return prompts_[number] = prompt;
        alignment_.run(example.words.data() + example.num_prompt - 1,
                       weights.data() + example.num_prompt - 1, example.num_prompt,
                       words_.data() + num_prompt_ - 1, weights_.data() + num_prompt_ - 1,
                       num_prompt_, -1);
        int num = 0, num_new = 0;
        for (int i = 1; i <= example.num_prompt; ++i)
            for (int j = 1; j <= num_prompt_; ++j)
                if (alignment_.score(i, j) > prompt.score &&
                    example.words[example.num_prompt - i] == words_[num_prompt_ - j])
                    prompt.score = alignment_.score(i, j), num = i, num_new = j;
        prompt.first = example.num_prompt - num, prompt.new_first = num_prompt_ - num_new;
        alignment_.trace(num, num_new, [&](int i, int j) {
            prompt.images[example.num_prompt - 1 - i] = num_prompt_ - 1 - j;
        });
        extend(prompt, example.words);
        return prompts_[number] = std::move(prompt);
    }

    // Before the first equal word there may be a slot.
    void extend(PromptAlignment& prompt, const Words& words) const {
        for (int num = 0; num < kMaxBefore && prompt.first > 0 && prompt.new_first > 0; ++num) {
            const Kind kind = words[prompt.first - 1].kind;
            if (kind == kMark || kind != words_[prompt.new_first - 1].kind) break;
            prompt.images[--prompt.first] = --prompt.new_first;
        }
    }

    bool transfer(const Candidate& candidate, Guess& guess) {
        const PromptAlignment& prompt = align_prompt(candidate.number);
        const Example& example = examples_.at(candidate.number);
        std::vector<int> images = prompt.images;
        images.resize(example.words.size(), -1);
        Candidate again = candidate;
        align_output(again);
        alignment_.trace(again.num_output, size() - num_prompt_, [&](int i, int j) {
            images[example.num_prompt + i] = num_prompt_ + j;
        });
        guess.number = candidate.number;
        guess.begin = example.num_prompt + candidate.num_output;
        Transfer said(examples_, example, words_, num_prompt_, prompt, std::move(images),
                      guess.begin);
        guess.num_parts = said.say(guess.begin, example.num_own, guess.parts);
        if (guess.num_parts < 0) return false;
        float most = prompt_weight_ + 1e-9f;
        for (int i = num_prompt_; i < size(); ++i) most += kOutputFactor * weights_[i];
        guess.score = prompt.score / most - kWordPenalty * std::min(3, said.num_exchanged) -
                      kRankPenalty * std::min(3, said.num_ranked);
        const int num_words = static_cast<int>(example.words.size());
        guess.num_next_parts =
            said.say(example.next_begin, num_words, guess.parts + guess.num_parts);
        return true;
    }

    Examples& examples_;
    Words words_;  // the prompt's end, then what is said
    const int num_prompt_;
    std::vector<float> weights_;
    float prompt_weight_ = 0;
    std::unordered_map<int32_t, float> weight_of_;  // of the prompt's words
    int64_t first_weighed_ = 0, num_weighed_ = 0;  // examples of which common weights are known
    std::vector<float> common_weights_;
    std::unordered_map<int64_t, PromptAlignment> prompts_;
    Alignment alignment_;
};

}  // namespace stemma

using stemma::Analogy;
using stemma::Examples;

extern "C" Examples* stemma_new_examples(int32_t max_examples) {
    return new Examples(max_examples);
}

extern "C" void stemma_free_examples(Examples* examples) { delete examples; }

extern "C" void stemma_add_example(Examples* examples, const int32_t* ids, const uint8_t* kinds,
                                   int32_t num_prompt, int32_t num_words) {
    stemma::Words words;
    stemma::append(words, ids, kinds, num_words);
    examples->add(std::move(words), num_prompt);
}

// Of example `number`: what was appended behind it, and the next output.
extern "C" void stemma_extend_example(Examples* examples, int64_t number, const int32_t* ids,
                                      const uint8_t* kinds, int32_t num_between,
                                      int32_t num_words) {
    examples->extend(number, ids, kinds, num_between, num_words);
}

// The examples live longer than it does.
extern "C" Analogy* stemma_new_analogy(Examples* examples, const int32_t* ids,
                                       const uint8_t* kinds, int32_t num_words) {
    stemma::Words words;
    stemma::append(words, ids, kinds, num_words);
    return new Analogy(examples, std::move(words));
}

extern "C" void stemma_free_analogy(Analogy* analogy) { delete analogy; }

// Into `guesses` [room]; returns how many.
extern "C" int32_t stemma_propose_analogies(Analogy* analogy, const int32_t* ids,
                                            const uint8_t* kinds, int32_t num_words,
                                            stemma::Guess* guesses, int32_t room) {
    return analogy->propose(ids, kinds, num_words, guesses, room);
}
