// Sums and exchanges between the processes of one machine that hold a model together, through
// memory that they share.
//
//     header   is_aborted | arrivals of rank 0 | of rank 1 | ...      a cache line each
//     slots    [2][num_ranks][slot_bytes]                             by the parity of the exchange
//
// An exchange: a rank writes its part into its slot, adds one to its arrivals, and waits for those
// of the others. It needs no second wait: a slot is written again two exchanges later, and a rank
// that has arrived at the one between them has read it. Who waits spins for a bounded time, then
// sleeps on a futex, and looks now and then whether the exchange has been given up.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>

#include "bf16.h"
#include "native.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stemma {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMaxRanks = 62;  // mirrored by communicator.py: the header takes a page
constexpr int64_t kHeaderBytes = 4096;
constexpr int kLookMs = 20;
constexpr int kYieldUs = 5;  // then a rank that waits lets others have its core, the awaited one perhaps

struct alignas(kLine) Arrivals {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> num_asleep;  // who wait for more of them
};

struct Header {
    alignas(kLine) std::atomic<uint32_t> is_aborted;
    Arrivals arrivals[kMaxRanks];
};
static_assert(sizeof(Header) <= kHeaderBytes);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until the word is no longer `seen`, or for kLookMs.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, kLookMs * 1000000L};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
            0);
#else
    (void)word;
#endif
}

class Communicator {
  public:
    Communicator(void* memory, int64_t rank, int64_t num_ranks, int64_t slot_bytes, int64_t spin_us)
        : header_(static_cast<Header*>(memory)),
          slots_(static_cast<char*>(memory) + kHeaderBytes),
          rank_(rank),
          num_ranks_(num_ranks),
          slot_bytes_(slot_bytes),
          spin_us_(spin_us) {}

    int64_t slot_bytes() const { return slot_bytes_; }
    int64_t rank() const { return rank_; }
    int64_t num_ranks() const { return num_ranks_; }
    bool is_aborted() const { return header_->is_aborted.load(std::memory_order_relaxed) != 0; }

    void abort() {
        header_->is_aborted.store(1);
        for (int64_t rank = 0; rank < num_ranks_; ++rank) wake_all(header_->arrivals[rank].count);
    }

    // Of the exchange under way.
    char* slot(int64_t rank) const {
        return slots_ + ((round_ & 1) * num_ranks_ + rank) * slot_bytes_;
    }

    // Give `bytes` <= slot_bytes to the others; theirs lie in their slots as soon as `wait` says so,
    // until the exchange after the next.
    void give(const void* data, int64_t bytes) {
        ++round_;
        std::memcpy(slot(rank_), data, bytes);
        Arrivals& own = header_->arrivals[rank_];
        own.count.store(round_);
        if (own.num_asleep.load() != 0) wake_all(own.count);
    }

    // False: given up.
    bool wait(int64_t rank) {
        Arrivals& other = header_->arrivals[rank];
        if (has_arrived(other)) return true;
        using Clock = std::chrono::steady_clock;
        const auto began = Clock::now();
        for (auto waited = began - began; waited < std::chrono::microseconds(spin_us_);
             waited = Clock::now() - began) {
            for (int i = 0; i < 32; ++i) {
                pause();
                if (has_arrived(other)) return true;
            }
            if (waited > std::chrono::microseconds(kYieldUs)) std::this_thread::yield();
        }
        while (!is_aborted()) {
            other.num_asleep.fetch_add(1);
            const uint32_t seen = other.count.load();
            if (static_cast<int32_t>(seen - round_) < 0) sleep_while(other.count, seen);
            other.num_asleep.fetch_sub(1);
            if (has_arrived(other)) return true;
        }
        return false;
    }

    bool wait_for_all() {
        for (int64_t rank = 0; rank < num_ranks_; ++rank)
            if (rank != rank_ && !wait(rank)) return false;
        return true;
    }

  private:
    bool has_arrived(const Arrivals& other) const {
        const uint32_t count = other.count.load(std::memory_order_acquire);
        return static_cast<int32_t>(count - round_) >= 0;
    }

    Header* header_;
    char* slots_;
    int64_t rank_, num_ranks_, slot_bytes_, spin_us_;
    uint32_t round_ = 0;
};

Communicator& of(void* communicator) { return *static_cast<Communicator*>(communicator); }

// x [size]: the sum of all ranks' slots, in their order, rounded once.
void sum_slots(const Communicator& all, bf16* x, int64_t size) {
    const auto slot = [&](int64_t rank) { return reinterpret_cast<const bf16*>(all.slot(rank)); };
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        Floats sum = load_bf16(slot(0) + i);
        for (int64_t rank = 1; rank < all.num_ranks(); ++rank) sum = sum + load_bf16(slot(rank) + i);
        store_bf16(x + i, sum);
    }
    if (i == size) return;
    const Mask lanes = lanes_below(size - i);
    Floats sum = load_bf16(slot(0) + i, lanes);
    for (int64_t rank = 1; rank < all.num_ranks(); ++rank) sum = sum + load_bf16(slot(rank) + i, lanes);
    store_bf16(x + i, sum, lanes);
}

template <class T>
void sum_slots(const Communicator& all, T* x, int64_t size) {
    std::memcpy(x, all.slot(0), size * sizeof(T));
    for (int64_t rank = 1; rank < all.num_ranks(); ++rank) {
        const T* from = reinterpret_cast<const T*>(all.slot(rank));
        for (int64_t i = 0; i < size; ++i) x[i] += from[i];
    }
}

// Part by part, as much as a slot takes.
template <class T>
void all_reduce(Communicator& all, T* x, int64_t count) {
    const int64_t at_once = all.slot_bytes() / static_cast<int64_t>(sizeof(T));
    for (int64_t first = 0; first < count; first += at_once) {
        const int64_t size = std::min(at_once, count - first);
        all.give(x + first, size * sizeof(T));
        if (!all.wait_for_all()) return;
        sum_slots(all, x + first, size);
    }
}

}  // namespace
}  // namespace stemma

using namespace stemma;

// memory: shared by all ranks, zeros at the start, as many bytes as `stemma_communicator_bytes`.
extern "C" int64_t stemma_communicator_bytes(int64_t num_ranks, int64_t slot_bytes) {
    return kHeaderBytes + 2 * num_ranks * slot_bytes;
}

extern "C" void* stemma_communicator(void* memory, int64_t rank, int64_t num_ranks,
                                     int64_t slot_bytes, int64_t spin_us) {
    return new (std::nothrow) Communicator(memory, rank, num_ranks, slot_bytes, spin_us);
}

extern "C" void stemma_communicator_free(void* communicator) {
    delete static_cast<Communicator*>(communicator);
}

// From any thread of any rank: whoever waits, or will wait, gives up.
extern "C" void stemma_communicator_abort(void* communicator) { of(communicator).abort(); }

extern "C" int32_t stemma_communicator_is_aborted(void* communicator) {
    return of(communicator).is_aborted();
}

// x [count], changed to the sum over the ranks; kind: 0 bf16, 1 float, 2 double. Given up, x holds
// anything.
extern "C" void stemma_all_reduce(void* communicator, void* x, int64_t count, int64_t kind) {
    Communicator& all = of(communicator);
    if (kind == 0) all_reduce(all, static_cast<bf16*>(x), count);
    if (kind == 1) all_reduce(all, static_cast<float*>(x), count);
    if (kind == 2) all_reduce(all, static_cast<double*>(x), count);
}

// data [bytes] of this rank, bytes <= slot_bytes, the same number everywhere -> all [num_ranks,
// bytes].
extern "C" void stemma_all_gather(void* communicator, const void* data, int64_t bytes, void* all) {
    Communicator& ranks = of(communicator);
    ranks.give(data, bytes);
    for (int64_t rank = 0; rank < ranks.num_ranks(); ++rank) {
        if (!ranks.wait(rank)) return;
        std::memcpy(static_cast<char*>(all) + rank * bytes, ranks.slot(rank), bytes);
    }
}

// sizes [num_ranks, num_ranks]: the bytes that each rank, a row, gives to each. data: what this one
// gives, in the order of the ranks; received: what it is given, likewise.
extern "C" void stemma_all_to_all(void* communicator, const void* data, const int64_t* sizes,
                                  void* received) {
    Communicator& ranks = of(communicator);
    const int64_t count = ranks.num_ranks(), slot_bytes = ranks.slot_bytes();
    const auto begin_of = [&](int64_t from, int64_t to) {
        return std::accumulate(sizes + from * count, sizes + from * count + to, int64_t{0});
    };
    int64_t largest = 0;
    for (int64_t from = 0; from < count; ++from) largest = std::max(largest, begin_of(from, count));
    const int64_t given = begin_of(ranks.rank(), count);
    for (int64_t first = 0; first < largest; first += slot_bytes) {  // as many on every rank
        const int64_t size = std::clamp<int64_t>(given - first, 0, slot_bytes);
        ranks.give(static_cast<const char*>(data) + (size > 0 ? first : 0), size);
        char* target = static_cast<char*>(received);
        for (int64_t from = 0; from < count; ++from) {
            if (!ranks.wait(from)) return;
            const int64_t begin = begin_of(from, ranks.rank());
            const int64_t end = begin + sizes[from * count + ranks.rank()];
            const int64_t low = std::max(begin, first), high = std::min(end, first + slot_bytes);
            if (low < high)
                std::memcpy(target + (low - begin), ranks.slot(from) + (low - first), high - low);
            target += end - begin;
        }
    }
}
