// An automaton's transitions as masks are walked over them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "automata.h"

namespace stemma {

class Lazy;
void fill_row(Lazy& lazy, int32_t state);  // may move the rows
void begin_call(Lazy& lazy);               // its limit of work begins anew

struct Table {
    static constexpr int64_t kFull = 1, kFailed = 2;

    const uint8_t* class_of;     // [256]
    const int32_t* transitions;  // [num_states, num_classes]; of a lazy automaton -1: not made yet
    int64_t num_classes;
    int16_t* runs;  // [num_states]: 2 * (length of free runs) + is_exact, or -1: unknown
    Lazy* lazy;     // makes the rows; null where all are there
    // Of `lazy`. kFull: it takes much memory. kFailed: rows made since then lead nowhere.
    int64_t limit;

    int32_t step(int32_t state, int byte) const {
        const int32_t to = transitions[state * num_classes + class_of[byte]];
        if (to >= 0) return to;
        fill_row(*lazy, state);
        return transitions[state * num_classes + class_of[byte]];
    }
};

static_assert(offsetof(Table, limit) == 40, "constrained/lazy.py reads it there");

}  // namespace stemma
