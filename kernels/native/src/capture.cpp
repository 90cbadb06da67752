// A captured forward pass: kernel calls with their arguments, run one after the other. What a CUDA
// graph is on a GPU; here it saves the time in the interpreter, whose code and data the weights
// have pushed out of the caches by the time that it runs again.
#include <cstring>

#include "native.h"

using namespace stemma;

namespace {

// Mirrored by capture.py.
enum Kind : int64_t {
    kLinear,
    kRmsNorm,
    kRotateAndStore,
    kAttention,
    kGatherRows,
    kNormSlices,
    kScale,
    kAdd,
    kQuantizedLinear,
    kActAndMul,
    kLora,
    kAllReduce,
    kGatherShare,
    kJoinColumns
};
struct Call {
    int64_t kind;
    int64_t args[13];
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

// The caller has put this step's plans in place of those that were captured.
extern "C" void stemma_replay(const void* calls, int64_t num_calls) {
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
                                        pointer<float>(a[4]), pointer<int64_t>(a[5]), a[6], a[7],
                                        a[8], a[9], a[10], a[11], a[12]);
                break;
            case kAttention:
                stemma_attention(pointer<void>(a[0]), pointer<void>(a[1]), a[2], pointer<void>(a[3]),
                                 pointer<float>(a[4]), pointer<float>(a[5]), pointer<void>(a[6]));
                break;
            case kGatherRows:
                stemma_gather_rows(pointer<void>(a[0]), pointer<int64_t>(a[1]),
                                   pointer<void>(a[2]), a[3], a[4]);
                break;
            case kNormSlices:
                stemma_norm_slices(pointer<void>(a[0]), pointer<float>(a[1]), number(a[2]), a[3],
                                   a[4], a[5], a[6]);
                break;
            case kScale:
                stemma_scale(pointer<void>(a[0]), number(a[1]), a[2], a[3]);
                break;
            case kAdd:
                stemma_add(pointer<void>(a[0]), pointer<void>(a[1]), a[2], a[3]);
                break;
            case kQuantizedLinear:
                stemma_quantized_linear(pointer<QuantizedLinear>(a[0]), pointer<void>(a[1]),
                                        pointer<void>(a[2]), a[3], pointer<void>(a[4]));
                break;
            case kActAndMul:
                stemma_act_and_mul(pointer<float>(a[0]), pointer<void>(a[1]), a[2], a[3], a[4]);
                break;
            case kLora:
                stemma_lora(pointer<LoraRuns>(a[0]), pointer<LoraTables>(a[1]), pointer<void>(a[2]),
                            pointer<void>(a[3]), a[4]);
                break;
            case kAllReduce:
                stemma_all_reduce(pointer<void>(a[0]), pointer<void>(a[1]), a[2], a[3]);
                break;
            case kGatherShare:
                stemma_gather_share(pointer<void>(a[0]), pointer<int64_t>(a[1]),
                                    pointer<void>(a[2]), a[3], a[4], a[5], a[6]);
                break;
            case kJoinColumns:
                stemma_join_columns(pointer<void>(a[0]), pointer<void>(a[1]), pointer<void>(a[2]),
                                    a[3], a[4], a[5]);
                break;
        }
    }
}
