// The orthogonal transform of reference/kv_store.py, in its order of additions.
#pragma once

#include <cmath>

namespace stemma {

// x [size] in place: blocks of the largest power of two that divides size, each by a Hadamard matrix.
inline void hadamard(float* x, int size) {
    const int block = size & -size;
    for (int half = 1; half < block; half *= 2)
        for (int first = 0; first < size; first += 2 * half)
            for (int i = first; i < first + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    const float scale = 1.0f / std::sqrt(static_cast<float>(block));
    for (int i = 0; i < size; ++i) x[i] *= scale;
}

}  // namespace stemma
