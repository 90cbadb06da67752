// Texts of which later ones are said by analogy, as words; and how much each word says of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace stemma {

enum Kind : uint8_t { kNumber, kName, kWord, kMark };  // a name begins with a capital letter

struct Word {
    int32_t id;
    Kind kind;

    bool operator==(const Word& other) const { return id == other.id; }
    bool operator!=(const Word& other) const { return id != other.id; }
};

using Words = std::vector<Word>;

inline void append(Words& words, const int32_t* ids, const uint8_t* kinds, int32_t num_words) {
    for (int32_t i = 0; i < num_words; ++i) words.push_back({ids[i], static_cast<Kind>(kinds[i])});
}

// The ids of words[first, last), each once.
inline std::vector<int32_t> ids_of(const Words& words, int first, int last) {
    std::vector<int32_t> ids;
    for (int i = first; i < last; ++i) ids.push_back(words[i].id);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
}

// A call, as words:
//
//     prompt's end | output | what was appended behind it | the next call's output
//     0       num_prompt   num_own                  next_begin         words.size()
//
// Without a next call, next_begin is words.size().
struct Example {
    Words words;
    int num_prompt, num_own, next_begin;
    std::vector<int32_t> ids, output_ids;  // of prompt and output, of the output
    std::vector<float> weights;            // of prompt and output
    int64_t num_known = 0;                 // examples by which they were weighed
};

// A word weighs the more the fewer examples have it; but what few or none have is a slot's, which
// says nothing. All constants were tuned on agents' conversations (docs/how-it-works/ahead.md).
constexpr float kSlotWeight = 0.3f, kUnknownWeight = 0.5f, kLeastWeight = 0.5f, kMostIdf = 3;
constexpr int kMaxOfSlot = 2;       // examples in which a name is a slot's
constexpr int kMinInTemplates = 3;  // outputs in which a word is their template's
constexpr int kTemplateShare = 8;   // a name is a template's that one of so many outputs has

// The examples of one op, at most `max_examples`, the oldest of which go. Numbered from 0 on.
class Examples {
  public:
    explicit Examples(int32_t max_examples) : max_examples_(max_examples) {}

    int64_t first() const { return first_; }
    int64_t end() const { return first_ + static_cast<int64_t>(examples_.size()); }
    int64_t size() const { return static_cast<int64_t>(examples_.size()); }

    // NOTE: valid until the next one is added.
    const Example& at(int64_t number) const { return examples_[number - first_]; }

    void add(Words words, int num_prompt) {
        const int num_words = static_cast<int>(words.size());
        Example example{std::move(words), num_prompt, num_words, num_words, {}, {}, {}};
        example.ids = ids_of(example.words, 0, num_words);
        example.output_ids = ids_of(example.words, num_prompt, num_words);
        for (int32_t id : example.ids) ++counts_[id].num_texts;
        for (int32_t id : example.output_ids) ++counts_[id].num_outputs;
        examples_.push_back(std::move(example));
        if (size() > max_examples_) drop_oldest();
    }

    // What followed an example: `num_between` words, then the next output. Nothing if it is gone.
    void extend(int64_t number, const int32_t* ids, const uint8_t* kinds, int32_t num_between,
                int32_t num_words) {
        if (number < first_) return;
        Example& example = examples_[number - first_];
        example.words.resize(example.num_own);
        append(example.words, ids, kinds, num_words);
        example.next_begin = example.num_own + num_between;
    }

    int num_texts(int32_t id) const { return count(id).num_texts; }
    int num_outputs(int32_t id) const { return count(id).num_outputs; }

    // Whether outputs have this word whatever they are about.
    bool is_template(const Word& word) const {
        const int num = num_outputs(word.id);
        return word.kind == kName ? num >= kMinInTemplates && num * kTemplateShare >= size()
                                  : word.kind != kNumber && num >= kMinInTemplates;
    }

    float weight(const Word& word) const {
        if (word.kind == kNumber) return kSlotWeight;
        const int num = num_texts(word.id);
        if (word.kind == kName && num <= kMaxOfSlot) return kSlotWeight;
        if (num <= 1) return kUnknownWeight;
        return kLeastWeight + std::min(kMostIdf, std::log((size() + 1.0f) / num));
    }

    // Weighed anew where there are many more examples than there were.
    const std::vector<float>& weights(int64_t number) {
        Example& example = examples_[number - first_];
        if (example.weights.empty() || end() > example.num_known + example.num_known / 8) {
            example.weights.resize(example.num_own);
            for (int i = 0; i < example.num_own; ++i)
                example.weights[i] = weight(example.words[i]) * nearness(example.num_prompt - i);
            example.num_known = end();
        }
        return example.weights;
    }

    // What a word of a prompt counts that stands so far before its end; of outputs each counts 1.
    static float nearness(int distance) {
        constexpr int kMost = 256;
        static const std::vector<float> table = [] {
            std::vector<float> values(kMost + 1, 1.0f);
            for (int i = 1; i <= kMost; ++i)
                values[i] = std::exp2(-(i - 1) / 40.0f) * (1 + 3 * std::exp2(-(i - 1) / 6.0f));
            return values;
        }();
        return table[std::max(0, std::min(distance, kMost))];
    }

  private:
    struct Count {
        int32_t num_texts = 0, num_outputs = 0;
    };

    Count count(int32_t id) const {
        const auto found = counts_.find(id);
        return found == counts_.end() ? Count{} : found->second;
    }

    void drop_oldest() {
        for (int32_t id : examples_.front().output_ids) --counts_[id].num_outputs;
        for (int32_t id : examples_.front().ids)
            if (--counts_[id].num_texts == 0) counts_.erase(id);
        examples_.pop_front();
        ++first_;
    }

    const int64_t max_examples_;
    int64_t first_ = 0;
    std::deque<Example> examples_;
    std::unordered_map<int32_t, Count> counts_;
};

}  // namespace stemma
