// Where contexts occur in outputs, those of open texts included: hash chains over a ring of entries,
// one for each token, scope and order. What is overwritten is the oldest of all namespaces; nothing
// is ever rebuilt.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "texts.h"

namespace stemma {

// Owns all texts. Invariant: an entry is valid while its sequence number lies in [oldest, next);
// a closed text lives while entries point to it, and closed texts use at most `max_text_bytes`.
class History {
  public:
    // `bits`: of the number of entries.
    History(int bits, int64_t max_text_bytes)
        : bits_(bits),
          entries_(zeros<Entry>(bits)),
          heads_(zeros<uint32_t>(bits)),
          max_text_bytes_(max_text_bytes) {}

    int32_t open(const Place& place, const int32_t* prompt, int64_t num_prompt) {
        int32_t id;
        if (free_.empty()) {
            id = static_cast<int32_t>(texts_.size());
            texts_.emplace_back(&memory_);
        } else {
            id = free_.back();
            free_.pop_back();
        }
        Text& text = texts_[id];
        text.place = place;
        text.tokens.assign(prompt, prompt + num_prompt);
        text.num_prompt = num_prompt;
        text.is_open = text.is_used = true;
        return id;
    }

    // NOTE: valid until the next text is opened.
    Text& at(int32_t id) { return texts_[id]; }
    const Text& at(int32_t id) const { return texts_[id]; }

    // Append to an open text; others may match the new tokens at once, in the `scopes` allowed.
    void extend(int32_t id, const int32_t* tokens, int64_t num_tokens, int32_t scopes) {
        Text& text = at(id);
        for (int64_t i = 0; i < num_tokens; ++i) {
            const ContextHashes hashes(text.begin(), text.end());
            const uint32_t position = static_cast<uint32_t>(text.num_output());
            text.tokens.push_back(tokens[i]);
            for (int32_t scope = kProgram; scope < kNumScopes; ++scope) {
                if (!(scopes >> scope & 1) || !has(text.place, scope)) continue;
                const uint64_t salt = salt_of(text.place, scope);
                for (int order = hashes.first; order < kNumOrders; ++order)
                    add(slot_of(hashes.of[order], salt), {id, position, 0});
            }
        }
    }

    void close(int32_t id) {
        Text& text = at(id);
        text.is_open = false;
        if (text.num_entries == 0) return release(id);
        text.trim();
        num_text_bytes_ += text.num_bytes();
        while (num_text_bytes_ > max_text_bytes_) drop_oldest();
    }

    // What followed the context in the texts that `scope` has for `own`, but its betters have not.
    void find(int32_t own, Scope scope, int32_t scopes, Matches& matches) const {
        const Place& place = at(own).place;
        if (!has(place, scope)) return;
        const uint64_t salt = salt_of(place, scope);
        const int num_before = matches.num_found;
        for (int order = matches.hashes.first; order < kNumOrders; ++order) {
            if (!matches.allows(order)) continue;
            uint32_t sequence = heads_[slot_of(matches.hashes.of[order], salt)];
            for (int visits = 0; is_valid(sequence) && visits < Matches::kMaxVisits; ++visits) {
                const Entry& entry = entries_[sequence & mask()];
                if (entry.text != own) {
                    const Text& text = at(entry.text);
                    if (scope_of(text.place, place, scopes) == scope)
                        matches.take(text, text.num_prompt + entry.position, scope, order);
                    if (matches.num_found - num_before == Matches::kMaxFound) return;
                }
                if (!is_earlier(entry.before, sequence)) break;
                sequence = entry.before;
            }
            if (matches.num_found > num_before) return;
        }
    }

    int64_t num_entries() const { return next_ - oldest_; }
    int64_t num_text_bytes() const { return num_text_bytes_; }
    int64_t num_table_bytes() const {
        return kEntryBytes << bits_;
    }
    const std::vector<Text>& texts() const { return texts_; }

  private:
    struct Entry {
        int32_t text;
        uint32_t position;  // in its output
        uint32_t before;    // the last entry with this hash
    };

  public:
    static constexpr int64_t kEntryBytes = sizeof(Entry) + sizeof(uint32_t);  // with its head

  private:

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    template <typename T>
    using Table = std::unique_ptr<T[], Free>;

    // Memory that is not touched is not used.
    template <typename T>
    static Table<T> zeros(int bits) {
        void* memory = std::calloc(size_t{1} << bits, sizeof(T));
        if (!memory) throw std::bad_alloc();
        return Table<T>(static_cast<T*>(memory));
    }

    static bool has(const Place& place, int32_t scope) {
        return scope == kNamespace || (scope == kProgram ? place.program : place.op) != 0;
    }

    // The best scope in which another text is a witness.
    static Scope scope_of(const Place& other, const Place& own, int32_t scopes) {
        if (other.name_space != own.name_space) return kNumScopes;
        if (scopes >> kProgram & 1 && own.program && other.program == own.program) return kProgram;
        if (scopes >> kOp & 1 && own.op && other.op == own.op) return kOp;
        return kNamespace;
    }

    static uint64_t salt_of(const Place& place, int32_t scope) {
        const int64_t key = scope == kProgram ? place.program : scope == kOp ? place.op : 0;
        const uint64_t of_namespace = ContextHashes::mixed(scope, place.name_space);
        return ContextHashes::mixed(of_namespace, key);
    }

    size_t slot_of(uint64_t hash, uint64_t salt) const {
        return ContextHashes::mixed(hash, static_cast<int64_t>(salt)) >> (64 - bits_);
    }

    uint32_t mask() const { return (uint32_t{1} << bits_) - 1; }

    // Sequence numbers wrap around: all that counts is how far they lie apart. A stale one that
    // looks valid again leads to an entry with another hash, whose tokens do not match.
    bool is_valid(uint32_t sequence) const { return next_ - 1 - sequence < next_ - oldest_; }
    bool is_earlier(uint32_t a, uint32_t b) const { return next_ - a > next_ - b; }

    void add(size_t slot, Entry entry) {
        if (next_ - oldest_ > mask()) drop_oldest();
        entry.before = heads_[slot];
        entries_[next_ & mask()] = entry;
        heads_[slot] = next_++;
        ++at(entry.text).num_entries;
    }

    void drop_oldest() {
        const int32_t id = entries_[oldest_++ & mask()].text;
        if (--at(id).num_entries == 0 && !at(id).is_open) {
            num_text_bytes_ -= at(id).num_bytes();
            release(id);
        }
    }

    void release(int32_t id) {
        texts_[id] = Text(&memory_);
        free_.push_back(id);
    }

    const int bits_;
    Table<Entry> entries_;
    Table<uint32_t> heads_;           // the last entry of each hash
    uint32_t next_ = 1, oldest_ = 1;     // 0 is of none: a head begins with it
    const int64_t max_text_bytes_;
    int64_t num_text_bytes_ = 0;  // of closed texts
    // Texts live long and are small. Memory of their own for them: among an engine's large blocks,
    // which come and go, each would keep one from being used again.
    std::pmr::unsynchronized_pool_resource memory_{{0, size_t{1} << 16}};
    std::vector<Text> texts_;
    std::vector<int32_t> free_;
};

}  // namespace stemma
