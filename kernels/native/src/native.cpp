#include "native.h"

namespace stemma {
namespace {
Pool* the_pool = nullptr;
}
Pool& pool() { return *the_pool; }
}  // namespace stemma

// Before any kernel; what the first call says holds. The pool lives as long as the process.
extern "C" void stemma_start(int32_t num_threads, int32_t spin_us) {
    static const stemma::Pool* const only = stemma::the_pool = new stemma::Pool(num_threads, spin_us);
    (void)only;
}
