// Every kernel on random numbers against loops over single numbers: for instruction sets that the
// Python tests cannot run on, by an emulator. Prints what differs; 0 if nothing does.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "attention.h"
#include "kv_format.h"
#include "linear_output.h"
#include "native.h"

extern "C" void stemma_start(int32_t num_threads, int32_t spin_us);
extern "C" void stemma_pack(const void* weight, int64_t num_rows, int64_t num_pairs, void* panels);
extern "C" void stemma_pack_quantized(const stemma::QuantizedLinear* weight, const void* values,
                                      const uint16_t* scales, const uint16_t* offsets);

using namespace stemma;
using std::vector;

namespace {

std::mt19937 generator(7);
int num_wrong = 0;

float uniform(float low = -1, float high = 1) {
    return std::uniform_real_distribution<float>(low, high)(generator);
}
bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
float to_float(float x) { return x; }
void set(bf16& to, float x) { to = to_bf16(x); }
void set(float& to, float x) { to = x; }

template <class T>
struct Aligned {  // to 64 bytes
    vector<char> bytes;
    T* at;
    explicit Aligned(size_t count) : bytes(count * sizeof(T) + 64) {
        at = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~63ull);
    }
};
template <class T>
vector<T> numbers(size_t count, float low = -1, float high = 1) {
    vector<T> all(count);
    for (T& each : all) set(each, uniform(low, high));
    return all;
}

void expect(const char* what, float found, float wanted, float tolerance) {
    if (std::abs(found - wanted) <= tolerance * std::max(1.0f, std::abs(wanted))) return;
    if (std::isnan(found) && std::isnan(wanted)) return;
    if (++num_wrong <= 20) std::printf("%s: %g, expected %g\n", what, found, wanted);
}

double activated(int kind, double gate) {
    if (kind == kGatedSilu) return gate / (1 + std::exp(-gate));
    if (kind == kGatedGelu) return gate / 2 * std::erfc(-gate / std::sqrt(2.0));
    return gate / 2 * (1 + std::tanh(0.7978845608 * (gate + 0.044715 * gate * gate * gate)));
}

// weight [num_outputs * (1 or 2), num_inputs] in the order of panels' lanes.
template <class T>
void check_linear(int kind, int64_t num_rows, int64_t num_inputs, int64_t num_outputs) {
    const bool is_gated = kind >= kGatedSilu;
    const int64_t each = is_gated ? kPanel / 2 : kPanel;
    const int64_t num_panels = (num_outputs + each - 1) / each, num_lanes = num_panels * kPanel;
    const auto x = numbers<T>(num_rows * num_inputs), lanes = numbers<T>(num_lanes * num_inputs);
    const auto bias = numbers<float>(num_lanes);
    Aligned<T> panels(num_lanes * num_inputs);
    const int64_t steps = num_inputs * static_cast<int64_t>(sizeof(T)) / 4;
    stemma_pack(lanes.data(), num_lanes, steps, panels.at);
    const PackedLinear weight{panels.at, bias.data(), num_inputs, num_outputs, num_panels, kind,
                              sizeof(T) == 4};
    const auto sum = [&](int64_t row, int64_t lane) {
        double total = bias[lane];
        for (int64_t i = 0; i < num_inputs; ++i)
            total += to_float(x[row * num_inputs + i]) * to_float(lanes[lane * num_inputs + i]);
        return total;
    };
    vector<float> floats(num_rows * num_outputs);
    vector<T> rounded(num_rows * num_outputs);
    void* y = kind == kFloatOutput ? static_cast<void*>(floats.data()) : rounded.data();
    stemma_linear(&weight, x.data(), y, num_rows);
    const float tolerance = sizeof(T) == 2 && kind != kFloatOutput ? 0.01f : 1e-4f;
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t column = 0; column < num_outputs; ++column) {
            const int64_t lane = column / each * kPanel + column % each;
            double wanted = sum(row, lane);
            if (is_gated) wanted = activated(kind, wanted) * sum(row, lane + 16);
            const int64_t at = row * num_outputs + column;
            expect("linear", kind == kFloatOutput ? floats[at] : to_float(rounded[at]),
                   static_cast<float>(wanted), tolerance);
        }
}

float half_to_float(int power) { return std::ldexp(1.0f, power); }
uint16_t half_of_power(int power) { return static_cast<uint16_t>((power + 15) << 10); }

void check_quantized(int64_t num_rows, int bits, bool is_fp4, int num_planes, bool has_scales,
                     bool has_offsets) {
    const float codes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const int64_t num_inputs = 192, num_outputs = num_rows <= 4 ? 1270 : 70, block = 64, num_blocks = 3;
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const auto x = numbers<bf16>(num_rows * num_inputs);
    vector<uint8_t> values(num_outputs * num_inputs * bits / 8);
    for (uint8_t& each : values) each = static_cast<uint8_t>(generator());
    vector<uint16_t> scales(num_outputs * num_blocks), offsets(scales.size());
    vector<int> powers(scales.size());
    for (size_t i = 0; i < scales.size(); ++i) {
        powers[i] = static_cast<int>(generator() % 5) - 4;
        scales[i] = half_of_power(powers[i]);
        offsets[i] = half_of_power(-2);
    }
    const auto columns = numbers<float>(num_panels * kPanel, 0.5f, 1.5f);
    const int64_t num_tables = has_scales + has_offsets;
    const int64_t panel_bytes = num_blocks * 64 * num_tables + kPanel * num_inputs * bits / 8;
    const int64_t row_bytes = (num_planes * num_inputs + 16 * num_blocks + 63) / 64 * 64;
    Aligned<char> panels(num_panels * panel_bytes), rows(num_rows * row_bytes);
    const QuantizedLinear weight{panels.at, nullptr, columns.data(), nullptr, num_inputs,
                                 num_outputs, num_panels, block, panel_bytes, row_bytes,
                                 kFloatOutput, bits, num_planes, has_scales, has_offsets, is_fp4};
    stemma_pack_quantized(&weight, values.data(), has_scales ? scales.data() : nullptr,
                          has_offsets ? offsets.data() : nullptr);
    vector<float> y(num_rows * num_outputs);
    stemma_quantized_linear(&weight, x.data(), y.data(), num_rows, rows.at);
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t column = 0; column < num_outputs; ++column) {
            double total = 0, size = 0;
            for (int64_t i = 0; i < num_inputs; ++i) {
                const int64_t at = column * num_inputs + i;
                double number = static_cast<int8_t>(values[at * bits / 8]);
                if (bits == 4) {
                    const int code = at % 2 ? values[at / 2] >> 4 : values[at / 2] & 15;
                    // The kernel's integers of floats are twice as large; who packs halves scales.
                    number = is_fp4 ? 2 * (code & 8 ? -codes[code & 7] : codes[code]) : code - 8;
                }
                const int64_t group = column * num_blocks + i / block;
                double weight_is = number * (has_scales ? half_to_float(powers[group]) : 1);
                if (has_offsets) weight_is += half_to_float(-2);
                total += weight_is * to_float(x[row * num_inputs + i]);
                size += std::abs(weight_is);
            }
            const float error = static_cast<float>(size) * (num_planes == 1 ? 0.006f : 1e-4f);
            expect("quantized", y[row * num_outputs + column],
                   static_cast<float>(total) * columns[column], error);
        }
}

template <class Number>
float kv_number(int format, const Number* at) {
    if (format == kBf16) return to_float(*reinterpret_cast<const bf16*>(at));
    const uint8_t code = *reinterpret_cast<const uint8_t*>(at);
    if (format == kInt8) return static_cast<int8_t>(code);
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10)
                                : std::ldexp(static_cast<float>(fraction), -9);
    return code & 128 ? -size : size;
}

// Number `dim` of a vector of 4 bits: its Hadamard transform, as reference/kv_store.py has it.
float transformed_number(const uint8_t* bytes, const uint8_t* range, int dims, int dim) {
    double sum = 0;
    for (int i = 0; i < dims; ++i) {
        const int half = i >= dims / 2, byte = bytes[i % (dims / 2)];
        const double scale = std::ldexp(8.0 + range[half] % 8, range[half] / 8 - 23);
        const double zero = range[2 + half] / 8.0 - 8;
        const double number = ((half ? byte >> 4 : byte & 15) - zero) * scale;
        sum += __builtin_popcount(i & dim) % 2 ? -number : number;
    }
    return static_cast<float>(sum / std::sqrt(dims));
}

// Two requests: a prompt's last `num_new` of 150 tokens in one item, and a token whose 130 keys two
// items share out.
template <class Out>
void check_attention(int format, float soft_cap, int num_new) {
    const int num_heads = 6, num_kv_heads = 2, num_slots = 320, num_tokens = num_new + 1;
    const int dims = format == kInt4 ? 64 : 48, per_byte = format == kInt4 ? 2 : 1;
    const int group = num_heads / num_kv_heads;
    const size_t count = 2ull * num_kv_heads * num_slots * dims;
    vector<uint8_t> bytes(count);
    const auto plain = numbers<Out>(count);
    for (uint8_t& each : bytes) do each = static_cast<uint8_t>(generator());
        while ((each & 0x7f) == 0x7f || each == 0x80);
    auto scales = numbers<float>(2 * num_kv_heads * num_slots, 0.001f, 0.01f);
    for (float& each : scales) {  // 2^-4 to 2^-3, and zeros about the middle
        uint8_t range[4];
        for (int i = 0; i < 4; ++i) range[i] = (i < 2 ? 128 : 100) + generator() % (i < 2 ? 8 : 48);
        if (format == kInt4) std::memcpy(&each, range, sizeof range);
    }
    const auto q = numbers<Out>(num_tokens * num_heads * dims);
    const auto sinks = numbers<float>(num_heads);
    vector<int32_t> slots(num_slots);
    for (int i = 0; i < num_slots; ++i) slots[i] = (i * 7 + 3) % num_slots;
    const vector<Item> items = {{0, num_new, 0, 150, 151 - num_new, -num_new, -1},
                                {num_new, 1, 150, 70, 70, -1, 0},
                                {num_new, 1, 220, 60, 60, -1, 1}};
    vector<float> partials(2 * num_heads * (dims + 2));
    const int32_t merged_tokens[] = {num_new}, merged_first[] = {0, 2}, merged[] = {0, 1};
    Plan plan{};
    plan.items = items.data(), plan.slots = slots.data(), plan.num_items = 3;
    plan.partials = partials.data(), plan.merged_tokens = merged_tokens;
    plan.merged_first = merged_first, plan.merged_partials = merged, plan.num_merged = 1;
    plan.num_slots = num_slots, plan.values_at = 1ll * num_kv_heads * num_slots * dims / per_byte;
    plan.num_heads = num_heads, plan.num_kv_heads = num_kv_heads, plan.head_dim = dims;
    plan.format = format, plan.scale = 0.3f, plan.soft_cap = soft_cap;
    vector<Out> out(num_tokens * num_heads * dims);
    const void* kv = format == kBf16 ? static_cast<const void*>(plain.data()) : bytes.data();
    const auto run = sizeof(Out) == 4 ? stemma_float_attention : stemma_attention;
    run(&plan, q.data(), num_heads * dims, kv, format == kBf16 ? nullptr : scales.data(),
        sinks.data(), out.data());
    vector<float> transformed(format == kInt4 ? count : 0);
    for (size_t at = 0; at < transformed.size(); ++at)
        transformed[at] = transformed_number(
            bytes.data() + at / dims * dims / 2,
            reinterpret_cast<const uint8_t*>(&scales[at / dims]), dims, static_cast<int>(at % dims));
    const auto number = [&](bool is_value, int head, int slot, int dim) {
        const size_t vector_at = (is_value * num_kv_heads + head) * num_slots + slot;
        const size_t at = vector_at * dims + dim;
        if (format == kBf16) return to_float(plain[at]);
        if (format == kInt4) return transformed[at];
        return kv_number(format, bytes.data() + at) * scales[vector_at];
    };
    for (int token = 0; token < num_tokens; ++token)
        for (int head = 0; head < num_heads; ++head) {
            const int first = token < num_new ? 0 : 150;
            const int keys = token < num_new ? 151 - num_new + token : 130;
            vector<double> weights(keys), sums(dims);
            double total = std::exp(sinks[head]);
            for (int key = 0; key < keys; ++key) {
                double score = 0;
                for (int dim = 0; dim < dims; ++dim)
                    score += to_float(q[(token * num_heads + head) * dims + dim]) *
                             number(false, head / group, slots[first + key], dim);
                score *= plan.scale;
                if (soft_cap > 0) score = soft_cap * std::tanh(score / soft_cap);
                total += weights[key] = std::exp(score);
            }
            for (int dim = 0; dim < dims; ++dim) {
                double mean = 0;
                for (int key = 0; key < keys; ++key)
                    mean += weights[key] / total * number(true, head / group, slots[first + key], dim);
                expect("attention", to_float(out[(token * num_heads + head) * dims + dim]),
                       static_cast<float>(mean), sizeof(Out) == 4 ? 1e-5f : 0.01f);
            }
        }
}

void check_norm(int64_t size) {
    const int64_t num_rows = 3;
    const auto x = numbers<bf16>(num_rows * size);
    auto residual = numbers<bf16>(num_rows * size);
    const auto before = residual;
    const auto weight = numbers<float>(size);
    vector<bf16> y(num_rows * size);
    stemma_rms_norm(x.data(), residual.data(), weight.data(), 1e-5, y.data(), num_rows, size);
    for (int64_t row = 0; row < num_rows; ++row) {
        double squares = 0;
        for (int64_t i = row * size; i < (row + 1) * size; ++i) {
            const float sum = to_float(to_bf16(to_float(before[i]) + to_float(x[i])));
            expect("residual", to_float(residual[i]), sum, 0);
            squares += sum * sum;
        }
        const double factor = 1 / std::sqrt(squares / size + 1e-5);
        for (int64_t i = 0; i < size; ++i)
            expect("norm", to_float(y[row * size + i]),
                   static_cast<float>(to_float(residual[row * size + i]) * factor) * weight[i], 0.01f);
    }
}

void check_store(int format) {
    const int64_t num_tokens = 3, num_heads = 3, num_kv_heads = 2, num_slots = 9, dims = 40, rotary = 24;
    const int64_t all = num_heads + 2 * num_kv_heads;
    auto heads = numbers<bf16>(num_tokens * all * dims, -3, 3);
    const auto before = heads, cos = numbers<bf16>(num_tokens * rotary), sin = numbers<bf16>(num_tokens * rotary);
    vector<uint8_t> kv(2 * num_kv_heads * num_slots * dims * 2);
    vector<float> scales(2 * num_kv_heads * num_slots);
    const int64_t slots[] = {4, 0, 7};
    stemma_rotate_and_store(heads.data(), cos.data(), sin.data(), kv.data(), scales.data(), slots,
                            num_tokens, num_heads, num_kv_heads, num_slots, dims, rotary, format);
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t head = 0; head < all; ++head)
            for (int64_t dim = 0; dim < dims; ++dim) {
                const bf16* from = before.data() + (token * all + head) * dims;
                float wanted = to_float(from[dim]);
                if (dim < rotary && head < num_heads + num_kv_heads) {
                    const float other = to_float(from[(dim + rotary / 2) % rotary]);
                    wanted = wanted * to_float(cos[token * rotary + dim]) +
                             other * to_float(sin[token * rotary + dim]);
                }
                if (head < num_heads) {
                    expect("rotated", to_float(heads[(token * all + head) * dims + dim]), wanted, 0.01f);
                    continue;
                }
                const int64_t at = (head - num_heads) * num_slots + slots[token];
                const uint8_t* stored = kv.data() + (at * dims + dim) * (format == kBf16 ? 2 : 1);
                const float scale = format == kBf16 ? 1 : scales[at];
                expect("stored", kv_number(format, stored) * scale, wanted,
                       format == kFp8 ? 0.07f : 0.03f);
            }
}

void check_lora() {
    const int64_t num_tokens = 7, num_inputs = 48, rank = 6, num_outputs = 37;
    const auto a = numbers<bf16>(2 * 2 * rank * num_inputs), b = numbers<bf16>(2 * num_outputs * rank);
    const auto x = numbers<bf16>(num_tokens * num_inputs);
    const LoraTables tables{a.data(), b.data(), num_inputs, rank, 2, {20, num_outputs, 0, 0}};
    const int64_t runs[] = {2, 0, 5, 1, 5, 7};
    const LoraRuns plan{runs, 2};
    auto y = numbers<float>(num_tokens * num_outputs);
    const auto before = y;
    stemma_lora(&plan, &tables, x.data(), y.data(), 1);
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t output = 0; output < num_outputs; ++output) {
            const int64_t slot = token < 5 ? 1 : 0, module = output < 20 ? 0 : 1;
            double sum = before[token * num_outputs + output];
            for (int64_t r = 0; r < rank; ++r) {
                double shrunk = 0;
                for (int64_t i = 0; i < num_inputs; ++i)
                    shrunk += to_float(x[token * num_inputs + i]) *
                              to_float(a[((slot * 2 + module) * rank + r) * num_inputs + i]);
                sum += to_float(to_bf16(static_cast<float>(shrunk))) *
                       to_float(b[(slot * num_outputs + output) * rank + r]);
            }
            expect("lora", y[token * num_outputs + output], static_cast<float>(sum), 0.02f);
        }
}

}  // namespace

int main() {
    stemma_start(2, 50);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 10, 23})
        for (const int kind : {0, 1, 2, 3, 4}) {
            check_linear<bf16>(kind, rows, 50, 70);
            check_linear<float>(kind, rows, 50, 70);
        }
    for (const int kind : {0, 1, 2}) check_linear<bf16>(kind, 103, 150, 70);
    for (const int64_t rows : {1, 2, 3, 6}) {  // few rows pass up to eight panels at once
        check_linear<bf16>(0, rows, 46, 1270);
        check_linear<float>(0, rows, 45, 1270);
    }
    for (const int64_t rows : {1, 2, 4, 11}) {
        check_quantized(rows, 8, false, 2, false, false);
        check_quantized(rows, 8, false, 2, true, false);
        check_quantized(rows, 8, false, 1, true, false);
        check_quantized(rows, 8, false, 1, false, false);
        check_quantized(rows, 4, false, 2, true, true);
        check_quantized(rows, 4, false, 2, true, false);
        check_quantized(rows, 4, true, 2, true, false);
    }
    for (const int num_new : {1, 2, 5, 40})
        for (const float soft_cap : {0.0f, 2.0f}) {
            for (const int format : {kBf16, kInt8, kFp8, kInt4}) check_attention<bf16>(format, soft_cap, num_new);
            check_attention<float>(kBf16, soft_cap, num_new);
        }
    for (const int64_t size : {16, 40, 33}) check_norm(size);
    for (const int format : {kBf16, kInt8, kFp8}) check_store(format);
    check_lora();
    std::printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
