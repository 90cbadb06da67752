#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace stemma {
namespace {

constexpr int kMaxChunks = 0xffff;

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// A hint that the thread waits.
inline void relax() {
#if defined(__aarch64__)
    asm volatile("yield");
#else
    __builtin_ia32_pause();
#endif
}

// Spins until `is_ready()` or the time is up; whether it became ready.
template <class F>
bool spin(int spin_us, F&& is_ready) {
    if (is_ready()) return true;
    const int64_t end = now_us() + spin_us;
    do {
        for (int i = 0; i < 64; ++i) {
            relax();
            if (is_ready()) return true;
        }
    } while (now_us() < end);
    return false;
}

}  // namespace

Pool::Pool(int num_threads, int spin_us) : spin_us_(spin_us) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    is_closing_ = true;
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int num_chunks, void (*run)(void*, int), void* context) {
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        if (!workers_.empty()) {
            const std::unique_lock<std::mutex> lock(is_busy_, std::try_to_lock);
            if (lock.owns_lock()) return share_out(chunk, num_chunks, run, context);
        }
        run(context, chunk);
    }
}

void Pool::share_out(int first, int num_chunks, void (*run)(void*, int), void* context) {
    for (; first < num_chunks; first += kMaxChunks) {
        const int count = num_chunks - first < kMaxChunks ? num_chunks - first : kMaxChunks;
        struct Shifted {
            void (*run)(void*, int);
            void* context;
            int first;
        } shifted{run, context, first};
        run_ = [](void* job, int chunk) {
            auto* inner = static_cast<Shifted*>(job);
            inner->run(inner->context, inner->first + chunk);
        };
        context_ = &shifted;
        num_left_.store(count, std::memory_order_relaxed);
        const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        ticket_.store(epoch << 32 | static_cast<uint64_t>(count), std::memory_order_release);
        epoch_.store(static_cast<uint32_t>(epoch), std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) wake_all(epoch_);
        while (claim_and_run()) {
        }
        const auto is_done = [this] { return num_left_.load(std::memory_order_acquire) == 0; };
        while (!spin(spin_us_, is_done)) std::this_thread::yield();
    }
}

bool Pool::claim_and_run() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
        if ((ticket >> 16 & 0xffff) >= (ticket & 0xffff)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + (1 << 16), std::memory_order_acq_rel));
    run_(context_, static_cast<int>(ticket >> 16 & 0xffff));
    num_left_.fetch_sub(1, std::memory_order_acq_rel);
    return true;
}

void Pool::work() {
    uint32_t seen = 0;
    while (true) {
        const auto is_new = [this, seen] {
            return epoch_.load(std::memory_order_acquire) != seen;
        };
        if (!spin(spin_us_, is_new)) {
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            while (!is_new()) sleep_while(epoch_, seen);
            num_asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        if (is_closing_) return;
        seen = epoch_.load(std::memory_order_acquire);
        while (claim_and_run()) {
        }
    }
}

}  // namespace stemma
