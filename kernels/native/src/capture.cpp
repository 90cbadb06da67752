// A captured forward pass: kernel calls with their arguments, run one after the other. What a CUDA
// graph is on a GPU; here it saves the time in the interpreter, whose code and data the weights
// have pushed out of the caches by the time that it runs again.
#include <cstring>

#include "native.h"

using namespace stemma;

namespace {

// Mirrored by capture.py.
enum Kind : int64_t { kLinear, kRmsNorm, kRotateAndStore, kAttention, kGatherRows };
struct Call {
    int64_t kind;
    int64_t args[10];
};

template <class T>
T* pointer(int64_t value) {
    return reinterpret_cast<T*>(value);
}

double number(int64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

// `attention`: the plan of this step, in place of the one that the calls were captured with.
extern "C" void stemma_replay(const void* calls, int64_t num_calls, const void* attention) {
    for (int64_t i = 0; i < num_calls; ++i) {
        const Call& call = static_cast<const Call*>(calls)[i];
        const int64_t* a = call.args;
        switch (call.kind) {
            case kLinear:
                stemma_linear(pointer<PackedLinear>(a[0]), pointer<void>(a[1]),
                              pointer<void>(a[2]), a[3]);
                break;
            case kRmsNorm:
                stemma_rms_norm(pointer<void>(a[0]), pointer<void>(a[1]), pointer<float>(a[2]),
                                number(a[3]), pointer<void>(a[4]), a[5], a[6]);
                break;
            case kRotateAndStore:
                stemma_rotate_and_store(pointer<void>(a[0]), pointer<void>(a[1]),
                                        pointer<void>(a[2]), pointer<void>(a[3]),
                                        pointer<int64_t>(a[4]), a[5], a[6], a[7], a[8], a[9]);
                break;
            case kAttention:
                stemma_attention(attention, pointer<void>(a[1]), a[2], pointer<void>(a[3]),
                                 pointer<void>(a[4]));
                break;
            case kGatherRows:
                stemma_gather_rows(pointer<void>(a[0]), pointer<int64_t>(a[1]),
                                   pointer<void>(a[2]), a[3], a[4]);
                break;
        }
    }
}
