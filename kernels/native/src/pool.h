// A pool of threads that share out the chunks of one job at a time.
//
// Chunks are claimed one by one, the calling thread claims too, and a job is over when its chunks
// are done: a thread that sleeps, or that lost its core to another process, delays nothing but the
// chunk it holds. (An OpenMP barrier waits for every thread: beside one busy process a step of many
// short loops is 10 to 70 times slower.) Between jobs a worker spins for a bounded time, then
// sleeps on a futex.
//
// Any thread may call: one that finds the pool at another's job (of a second engine in the process)
// runs its chunks itself until the pool is free, so that neither waits for the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace stemma {

class Pool {
  public:
    // num_threads >= 1 counts the calling thread.
    Pool(int num_threads, int spin_us);
    ~Pool();

    // Calls run(context, chunk) for each chunk in [0, num_chunks), on any thread, in any order;
    // returns when all have run. A chunk starts no job.
    void run(int num_chunks, void (*run)(void*, int), void* context);

    template <class F>
    void for_each(int num_chunks, F&& body) {
        if (num_chunks == 1) {
            body(0);
            return;
        }
        run(num_chunks, [](void* context, int chunk) { (*static_cast<F*>(context))(chunk); }, &body);
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  private:
    // Chunks [first, num_chunks).
    void share_out(int first, int num_chunks, void (*run)(void*, int), void* context);
    bool claim_and_run();
    void work();

    std::mutex is_busy_;  // held by the thread whose job it is
    // epoch << 32 | claimed << 16 | total. A claim that succeeds pins the job until it is done, so
    // the job's fields may be read after it.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int> num_left_{0};
    std::atomic<uint32_t> epoch_{0};
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> is_closing_{false};
    void (*run_)(void*, int) = nullptr;
    void* context_ = nullptr;
    int spin_us_;
    std::vector<std::thread> workers_;
};

}  // namespace stemma
