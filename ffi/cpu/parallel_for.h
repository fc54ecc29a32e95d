// SPDX-License-Identifier: Apache-2.0

// A parallel loop on a borrowed thread pool (XLA's own), built so that it cannot deadlock.
//
// Items are claimed from an atomic counter by the caller and by helpers put into the pool's queue.
// The caller drains the counter itself and then waits only for items that a helper has claimed,
// which is one that runs already; helpers that start late find nothing and touch nothing but the
// shared state. So it works when the pool is busy, has one thread, or runs the caller itself.

#ifndef JAX_PAGED_CPU_PARALLEL_FOR_H_
#define JAX_PAGED_CPU_PARALLEL_FOR_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jax_paged::cpu {

inline constexpr int kSpins = 2000;  // some microseconds: cheaper than to sleep and be woken

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls fn(item, worker) for each item in [0, num_items), worker in [0, num_workers); a worker
// number belongs to one thread at a time. `fn` must not throw. `pool` needs Schedule(callable).
template <typename Pool, typename Fn>
void ParallelFor(Pool& pool, int64_t num_items, int64_t num_workers, const Fn& fn) {
  if (num_workers > num_items) num_workers = num_items;
  if (num_workers <= 1) {
    for (int64_t i = 0; i < num_items; ++i) fn(i, 0);
    return;
  }

  struct State {
    State(const Fn* fn, int64_t num_items) : fn(fn), num_items(num_items) {}

    void Run() {
      int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      const int64_t worker = workers.fetch_add(1, std::memory_order_relaxed);
      int64_t finished = 0;
      for (; item < num_items; item = next.fetch_add(1, std::memory_order_relaxed)) {
        (*fn)(item, worker);
        ++finished;
      }
      if (done.fetch_add(finished, std::memory_order_acq_rel) + finished == num_items) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
    bool Done() const { return done.load(std::memory_order_acquire) == num_items; }

    const Fn* fn;  // lives in the caller's frame: used only between a claim and `done`
    const int64_t num_items;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> workers{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>(&fn, num_items);
  try {
    for (int64_t i = 1; i < num_workers; ++i) pool.Schedule([state] { state->Run(); });
  } catch (...) {
    // No memory for another helper: those that exist and the caller do the work.
  }
  state->Run();
  for (int i = 0; i < kSpins && !state->Done(); ++i) CpuRelax();
  if (!state->Done()) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all_done.wait(lock, [&] { return state->Done(); });
  }
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_PARALLEL_FOR_H_
