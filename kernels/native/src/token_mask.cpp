// Packed masks of the tokens that may be sampled, applied to rows of logits.
#include <algorithm>
#include <limits>

#include "native.h"
#include "vector.h"

namespace stemma {
namespace {

constexpr int64_t kWordsEach = 1024;  // of a chunk: 32,768 tokens

inline void forbid(float* at, uint32_t tokens) {
    const Floats low = splat(-std::numeric_limits<float>::infinity());
    store(at, low, static_cast<Mask>(tokens));
    store(at + 16, low, static_cast<Mask>(tokens >> 16));
}

inline void forbid(double* at, uint32_t tokens) {
    for (; tokens != 0; tokens &= tokens - 1)
        at[__builtin_ctz(tokens)] = -std::numeric_limits<double>::infinity();
}

template <class T>
void apply(T* logits, const int64_t* rows, const uint32_t* masks, int64_t num_rows,
           int64_t vocab_size, int64_t num_words) {
    const int64_t chunks_each = (num_words + kWordsEach - 1) / kWordsEach;
    pool().for_each(static_cast<int>(num_rows * chunks_each), [&](int chunk) {
        const int64_t row = chunk / chunks_each, first = chunk % chunks_each * kWordsEach;
        const int64_t last = std::min(num_words, first + kWordsEach);
        T* to = logits + rows[row] * vocab_size;
        for (int64_t word = first; word < last; ++word) {
            uint32_t tokens = ~masks[row * num_words + word];
            const int64_t num_left = vocab_size - word * 32;
            if (num_left < 32) tokens &= (1u << num_left) - 1;  // never past the row's end
            if (tokens != 0) forbid(to + word * 32, tokens);
        }
    });
}

}  // namespace
}  // namespace stemma

// logits [?, vocab_size] float32, or float64 where is_double; rows [num_rows] distinct; masks
// [num_rows, num_words], num_words = ceil(vocab_size / 32).
extern "C" void stemma_apply_token_mask(void* logits, const int64_t* rows, const uint32_t* masks,
                                        int64_t num_rows, int64_t vocab_size, int64_t num_words,
                                        int64_t is_double) {
    if (is_double)
        stemma::apply(static_cast<double*>(logits), rows, masks, num_rows, vocab_size, num_words);
    else
        stemma::apply(static_cast<float*>(logits), rows, masks, num_rows, vocab_size, num_words);
}
