// A small persistent pool instead of OpenMP: torch bundles its own OpenMP runtime, a second one would
// contend with it for the cores, and both wait at barriers by spinning, which on cores shared with
// other processes made two threads several times slower than one. Here a thread claims one task after
// another, so a thread that the system has put aside holds up its current task and nothing else.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <immintrin.h>
#include <mutex>
#include <thread>
#include <vector>

namespace sluicegate {
namespace {

// Idle threads spin this long before they sleep: the gap between two operators of a step is 5 to 30 us.
constexpr auto SPIN = std::chrono::microseconds(60);

// Rounding to nearest, denormals kept, exceptions masked. Every thread computes under it, or the
// bits would depend on which thread ran a task (torch can set the caller's to flush denormals).
constexpr unsigned DEFAULT_MXCSR = 0x1F80;

class Pool {
public:
    int size() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return 1 + (int)workers_.size();
    }

    void resize(int count) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (count == 1 + (int)workers_.size()) return;
        stopping_ = true;
        publish(0);
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
        for (int i = 1; i < count; i++) workers_.emplace_back([this, seen = calls_.load()] { work(seen); });
    }

    void run(int64_t count, Task task, const void* context) {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        // Another thread is using the pool (or there is none): do it alone, the result is the same.
        if (!lock.owns_lock() || workers_.empty() || count < 2) {
            for (int64_t i = 0; i < count; i++) task(context, i);
            return;
        }
        task_ = task;
        context_ = context;
        count_ = (uint32_t)count;
        unfinished_.store(count_, std::memory_order_relaxed);
        publish(count_);
        claim_tasks(calls_.load(std::memory_order_relaxed));
        wait([this] { return unfinished_.load(std::memory_order_acquire) == 0; }, unfinished_);
    }

private:
    // The ticket is (number of the call << 32) + tasks not yet claimed. A claim takes one off by
    // compare-and-swap, so a thread late from an earlier call cannot take a task of this one unseen.
    static uint32_t call_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }
    static uint32_t unclaimed(uint64_t ticket) { return (uint32_t)ticket; }

    void publish(uint32_t count) {
        const uint32_t call = calls_.load(std::memory_order_relaxed) + 1;
        ticket_.store(((uint64_t)call << 32) + count, std::memory_order_release);
        calls_.store(call, std::memory_order_release);
        calls_.notify_all();
    }

    void claim_tasks(uint32_t call) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (call_of(ticket) == call && unclaimed(ticket) > 0) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            // The call cannot end before this task has: what it published stays as it is.
            task_(context_, count_ - unclaimed(ticket));
            if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_all();
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void work(uint32_t seen) {
        _mm_setcsr(DEFAULT_MXCSR);
        for (;;) {
            wait([&] { return calls_.load(std::memory_order_acquire) != seen; }, calls_);
            seen = calls_.load(std::memory_order_acquire);
            if (stopping_) return;
            claim_tasks(seen);
        }
    }

    // Spin, then sleep until `atom` changes; `done` is asked again each time.
    template <class Done>
    static void wait(const Done& done, std::atomic<uint32_t>& atom) {
        const auto deadline = std::chrono::steady_clock::now() + SPIN;
        while (std::chrono::steady_clock::now() < deadline) {
            for (int i = 0; i < 64; i++) {
                if (done()) return;
                _mm_pause();
            }
        }
        for (uint32_t value = atom.load(); !done(); value = atom.load()) atom.wait(value);
    }

    std::mutex mutex_;  // held while a call uses the workers, and while their number changes
    std::vector<std::thread> workers_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};  // 32 bits: what a futex can wait on
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    Task task_ = nullptr;
    const void* context_ = nullptr;
    uint32_t count_ = 0;
};

// Never destroyed: a process may exit while another thread is inside an operator.
Pool& pool() {
    static Pool* const instance = new Pool;
    return *instance;
}

}  // namespace

int num_threads() { return pool().size(); }

void set_num_threads(int count) { pool().resize(std::max(count, 1)); }

void run_tasks(int64_t count, Task task, const void* context) {
    const unsigned mxcsr = _mm_getcsr();
    _mm_setcsr(DEFAULT_MXCSR);
    pool().run(count, task, context);
    _mm_setcsr(mxcsr);
}

extern "C" int32_t sluicegate_num_threads() { return num_threads(); }

extern "C" void sluicegate_set_num_threads(int32_t count) { set_num_threads(count); }

}  // namespace sluicegate
