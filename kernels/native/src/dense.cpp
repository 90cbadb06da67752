// The small ops between the products: norm, rotary embedding with the KV store, lookups.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bf16.h"
#include "kv_format.h"
#include "linear_output.h"
#include "native.h"

namespace stemma {
namespace {

// Rows of a chunk, so that a chunk has about this many elements: less is not worth sharing out.
constexpr int64_t kChunkElements = 32768;

template <class F>
void for_each_row(int64_t num_rows, int64_t row_size, F&& body) {
    const int64_t rows_each = std::max<int64_t>(kChunkElements / row_size, 1);
    pool().for_each(static_cast<int>((num_rows + rows_each - 1) / rows_each), [&](int chunk) {
        const int64_t last = std::min<int64_t>(num_rows, (chunk + 1) * rows_each);
        for (int64_t row = chunk * rows_each; row < last; ++row) body(row);
    });
}

inline Mask lanes_from(int64_t at, int64_t size) { return lanes_below(size - at); }

// In 16 parts.
inline Floats sum_of_squares(const bf16* from, int64_t size) {
    Floats squares = zero_floats();
    for (int64_t i = 0; i < size; i += 16) {
        const Floats value = load_bf16(from + i, lanes_from(i, size));
        squares = fmadd(value, value, squares);
    }
    return squares;
}

// from * weight / rms(from) -> to, which may be `from`.
inline void store_normed(const bf16* from, Floats squares, const float* weight, double eps,
                         bf16* to, int64_t size) {
    const float mean = sum_of(squares) / static_cast<float>(size);
    const Floats factor = splat(1.0f / std::sqrt(mean + static_cast<float>(eps)));
    for (int64_t i = 0; i < size; i += 16) {
        const Mask lanes = lanes_from(i, size);
        const Floats value = load_bf16(from + i, lanes) * factor;
        store_bf16(to + i, (value * load(weight + i, lanes)), lanes);
    }
}

}  // namespace
}  // namespace stemma

using namespace stemma;

// x, residual (or null, updated in place), y: [num_rows, size]; weight: float32.
extern "C" void stemma_rms_norm(const void* x, void* residual, const float* weight, double eps,
                                void* y, int64_t num_rows, int64_t size) {
    for_each_row(num_rows, size, [&](int64_t row) {
        const bf16* from = static_cast<const bf16*>(x) + row * size;
        Floats squares = zero_floats();
        if (residual != nullptr) {
            bf16* sum = static_cast<bf16*>(residual) + row * size;
            for (int64_t i = 0; i < size; i += 16) {
                const Mask lanes = lanes_from(i, size);
                const Floats added =
                    (load_bf16(sum + i, lanes) + load_bf16(from + i, lanes));
                store_bf16(sum + i, added, lanes);
                const Floats rounded = widen(narrow(added));
                squares = fmadd(rounded, rounded, squares);
            }
            from = sum;
        } else {
            squares = sum_of_squares(from, size);
        }
        store_normed(from, squares, weight, eps, static_cast<bf16*>(y) + row * size, size);
    });
}

// Of each token's row, `stride` elements long, the first num_slices runs of `size` elements are
// normed in place, each by itself.
extern "C" void stemma_norm_slices(void* x, const float* weight, double eps, int64_t num_tokens,
                                   int64_t stride, int64_t num_slices, int64_t size) {
    for_each_row(num_tokens, num_slices * size, [&](int64_t token) {
        bf16* slice = static_cast<bf16*>(x) + token * stride;
        for (int64_t index = 0; index < num_slices; ++index, slice += size)
            store_normed(slice, sum_of_squares(slice, size), weight, eps, slice, size);
    });
}

// halves [num_rows, 2 * size], gates first -> y [num_rows, size]: what a gated linear layer makes of
// the same sums.
extern "C" void stemma_act_and_mul(const float* halves, void* y, int64_t num_rows, int64_t size,
                                   int64_t kind) {
    for_each_row(num_rows, size, [&](int64_t row) {
        const float* gates = halves + row * 2 * size;
        bf16* to = static_cast<bf16*>(y) + row * size;
        for (int64_t i = 0; i < size; i += 16) {
            const Mask lanes = lanes_from(i, size);
            const Floats gate = load(gates + i, lanes);
            const Floats up = load(gates + size + i, lanes);
            store_bf16(to + i, gated<bf16>(static_cast<int32_t>(kind), gate, up), lanes);
        }
    });
}

extern "C" void stemma_scale(void* x, double factor, int64_t num_rows, int64_t size) {
    const Floats factors = splat(static_cast<float>(factor));
    for_each_row(num_rows, size, [&](int64_t row) {
        bf16* at = static_cast<bf16*>(x) + row * size;
        for (int64_t i = 0; i < size; i += 16) {
            const Mask lanes = lanes_from(i, size);
            store_bf16(at + i, (load_bf16(at + i, lanes) * factors), lanes);
        }
    });
}

extern "C" void stemma_add(void* total, const void* x, int64_t num_rows, int64_t size) {
    for_each_row(num_rows, size, [&](int64_t row) {
        bf16* to = static_cast<bf16*>(total) + row * size;
        const bf16* from = static_cast<const bf16*>(x) + row * size;
        for (int64_t i = 0; i < size; i += 16) {
            const Mask lanes = lanes_from(i, size);
            store_bf16(to + i, (load_bf16(to + i, lanes) + load_bf16(from + i, lanes)),
                       lanes);
        }
    });
}

namespace {

// Half rotation of the first dims numbers: with d = dims / 2, (a, b) = (from[:d], from[d:2d])
// becomes (a cos + b sin[:d], b cos + a sin[d:]), the first half of sin negated.
void rotate(const bf16* from, const bf16* cos, const bf16* sin, bf16* to, int64_t dims) {
    const int64_t half = dims / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const Mask lanes = lanes_from(i, half);
        const Floats a = load_bf16(from + i, lanes), b = load_bf16(from + half + i, lanes);
        const Floats first = fmadd(b, load_bf16(sin + i, lanes),
                                             (a * load_bf16(cos + i, lanes)));
        const Floats second = fmadd(a, load_bf16(sin + half + i, lanes),
                                              (b * load_bf16(cos + half + i, lanes)));
        store_bf16(to + i, first, lanes);
        store_bf16(to + half + i, second, lanes);
    }
}

}  // namespace

namespace {

// The largest magnitude of dims numbers; NaN where there is one, as the integers of NaNs are larger.
float largest_magnitude(const bf16* from, int64_t dims) {
    Ints largest = zero_ints();
    for (int64_t i = 0; i < dims; i += 16) {
        const Floats value = abs(load_bf16(from + i, lanes_from(i, dims)));
        largest = max(largest, as_ints(value));
    }
    const int32_t bits = largest_of(largest);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// float8_e4m3fn of |numbers| <= 448, to nearest, ties to even.
inline Ints to_fp8(Floats numbers) {
    const Ints bits = as_ints(numbers);
    const Ints magnitude = bits & splat(0x7fffffff);
    const Ints sign = shift_right<24>(bits) & splat(0x80);
    const Ints odd = shift_right<20>(magnitude) & splat(1);
    const Ints rounded = shift_right<20>(magnitude + odd + splat(0x7ffff));
    const Ints normal = rounded - splat((127 - 7) << 3);
    const Ints subnormal = round_to_ints(  // in units of 2^-9; 8 of them are normal
        as_floats(magnitude) * splat(512.0f));
    const Choice is_subnormal = less(magnitude, as_ints(splat(0x1p-6f)));
    return select(is_subnormal, subnormal, normal) | sign;
}

// One vector's numbers and scale, by the rule of reference/kv_store.py.
template <KVFormat kFormat>
void quantize(const bf16* from, int64_t dims, uint8_t* to, float* scale) {
    constexpr float kLimit = kFormat == kInt8 ? 127.0f : 448.0f;
    const float largest = largest_magnitude(from, dims);
    *scale = largest / kLimit;
    const Floats inverse = splat(kLimit / largest), limit = splat(kLimit);
    for (int64_t i = 0; i < dims; i += 16) {
        const Mask lanes = lanes_from(i, dims);
        const Floats product = load_bf16(from + i, lanes) * inverse;
        const Floats bounded = max(min(product, limit), zero_floats() - limit);
        const Floats number = select(is_number(product), bounded, zero_floats());
        const Ints code = kFormat == kInt8 ? round_to_ints(number) : to_fp8(number);
        store_bytes(to + i, code, lanes);
    }
}

// One half of a transformed vector: its scale's code, its zero's, and what makes numbers of it.
struct Range {
    int32_t code, zero_code;
    float inverse, zero;

    Range(const float* y, int64_t count) {
        float low = y[0], high = y[0];  // NaN where there is one
        for (int64_t i = 0; i < count; ++i) {
            low = y[i] < low || std::isnan(y[i]) ? y[i] : low;
            high = y[i] > high || std::isnan(y[i]) ? y[i] : high;
        }
        const float wanted = (high - low) * static_cast<float>(0.97 / 15);
        int32_t bits;
        std::memcpy(&bits, &wanted, sizeof bits);
        constexpr int32_t kFirst = NibbleKV::kFirstScaleCode;
        code = std::clamp(((bits + (1 << 19)) >> 20) - kFirst, 0, 254);
        if (!std::isfinite(wanted)) code = 255;
        float scale;
        bits = (code + kFirst) << 20;
        std::memcpy(&scale, &bits, sizeof scale);
        inverse = code == 255 ? NAN : 1.0f / scale;
        const float wanted_zero = (15.5f - (low + high) * 0.5f * inverse) * 8;
        zero_code = 0;
        if (!std::isnan(wanted_zero))
            zero_code = static_cast<int32_t>(
                std::clamp(std::nearbyint(wanted_zero), 0.0f, 255.0f));
        zero = static_cast<float>(zero_code) * 0.125f - 8.0f;
    }
    Ints numbers(const float* y) const {
        const Floats x = load(y) * splat(inverse) + splat(zero);
        const Floats bounded = min(max(x, zero_floats()), splat(15.0f));
        return round_to_ints(select(is_number(x), bounded, zero_floats()));
    }
};

// One vector's numbers of 4 bits, two a byte, and its halves' scales and zeros, by the same rule.
void quantize_in_4_bits(const bf16* from, int64_t dims, uint8_t* to, void* ranges) {
    thread_local std::vector<float> all;
    all.resize(dims);
    float* y = all.data();
    for (int64_t i = 0; i < dims; i += 16) store(y + i, load_bf16(from + i));
    hadamard(y, static_cast<int>(dims));
    const int64_t half = dims / 2;
    const Range first(y, half), second(y + half, half);
    for (int64_t i = 0; i < half; i += 16)
        store_bytes(to + i, first.numbers(y + i) | second.numbers(y + half + i) << 4, 0xffff);
    const uint8_t codes[] = {
        static_cast<uint8_t>(first.code), static_cast<uint8_t>(second.code),
        static_cast<uint8_t>(first.zero_code), static_cast<uint8_t>(second.zero_code)};
    std::memcpy(ranges, codes, sizeof codes);
}

}  // namespace

// heads [T, num_heads + 2 * num_kv_heads, dims]: queries are rotated in place, keys rotated into
// kv[0], values copied into kv[1]; kv [2, num_kv_heads, num_slots, dims] (4 bits: dims / 2) with its
// scales [2, num_kv_heads, num_slots] where the format has them (then keys are rotated in place
// before; 4 bits: of each vector 4 bytes of its halves, scales, then zeros);
// cos, sin [T, rotary_dim].
extern "C" void stemma_rotate_and_store(void* heads, const void* cos, const void* sin, void* kv,
                                        float* scales, const int64_t* slots, int64_t num_tokens,
                                        int64_t num_heads, int64_t num_kv_heads, int64_t num_slots,
                                        int64_t dims, int64_t rotary_dim, int64_t format) {
    const int64_t stride = (num_heads + 2 * num_kv_heads) * dims;
    for_each_row(num_tokens, stride, [&](int64_t token) {
        bf16* head = static_cast<bf16*>(heads) + token * stride;
        const bf16* cosines = static_cast<const bf16*>(cos) + token * rotary_dim;
        const bf16* sines = static_cast<const bf16*>(sin) + token * rotary_dim;
        const int64_t num_in_place = num_heads + (format == kBf16 ? 0 : num_kv_heads);
        for (int64_t h = 0; h < num_in_place; ++h)
            rotate(head + h * dims, cosines, sines, head + h * dims, rotary_dim);
        head += num_heads * dims;
        if (format == kBf16) {
            bf16* to = static_cast<bf16*>(kv) + slots[token] * dims;
            for (int64_t h = 0; h < 2 * num_kv_heads; ++h, head += dims, to += num_slots * dims) {
                const int64_t num_rotated = h < num_kv_heads ? rotary_dim : 0;
                rotate(head, cosines, sines, to, num_rotated);
                std::copy(head + num_rotated, head + dims, to + num_rotated);
            }
            return;
        }
        auto* const to = static_cast<uint8_t*>(kv);
        for (int64_t h = 0; h < 2 * num_kv_heads; ++h, head += dims) {
            const int64_t at = h * num_slots + slots[token];
            if (format == kInt4)
                quantize_in_4_bits(head, dims, to + at * dims / 2, scales + at);
            else if (format == kInt8)
                quantize<kInt8>(head, dims, to + at * dims, scales + at);
            else
                quantize<kFp8>(head, dims, to + at * dims, scales + at);
        }
    });
}

// rows[i] = table[index[i]], rows of row_bytes bytes.
extern "C" void stemma_gather_rows(const void* table, const int64_t* index, void* rows,
                                   int64_t num_rows, int64_t row_bytes) {
    for_each_row(num_rows, row_bytes / 2, [&](int64_t row) {
        std::memcpy(static_cast<char*>(rows) + row * row_bytes,
                    static_cast<const char*>(table) + index[row] * row_bytes, row_bytes);
    });
}

// The same of the rows [first, first + table_rows) of a larger table; zeros for others.
extern "C" void stemma_gather_share(const void* table, const int64_t* index, void* rows,
                                    int64_t num_rows, int64_t row_bytes, int64_t first,
                                    int64_t table_rows) {
    for_each_row(num_rows, row_bytes / 2, [&](int64_t row) {
        char* to = static_cast<char*>(rows) + row * row_bytes;
        const int64_t own = index[row] - first;
        if (own < 0 || own >= table_rows)
            std::memset(to, 0, row_bytes);
        else
            std::memcpy(to, static_cast<const char*>(table) + own * row_bytes, row_bytes);
    });
}

// Rows of first_bytes and of second_bytes bytes, side by side.
extern "C" void stemma_join_columns(const void* first, const void* second, void* joined,
                                    int64_t num_rows, int64_t first_bytes, int64_t second_bytes) {
    const int64_t row_bytes = first_bytes + second_bytes;
    for_each_row(num_rows, row_bytes / 2, [&](int64_t row) {
        char* to = static_cast<char*>(joined) + row * row_bytes;
        std::memcpy(to, static_cast<const char*>(first) + row * first_bytes, first_bytes);
        std::memcpy(to + first_bytes, static_cast<const char*>(second) + row * second_bytes,
                    second_bytes);
    });
}
