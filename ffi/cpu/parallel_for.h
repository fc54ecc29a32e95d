// SPDX-License-Identifier: Apache-2.0

// A parallel loop on a borrowed thread pool (XLA's own), built so that it cannot deadlock.
//
// Items are claimed from atomic counters by the caller and by helpers put into the pool's queue.
// The caller drains the counters itself and then waits only for items that a helper has claimed,
// which is one that runs already; helpers that start late find nothing and touch nothing but the
// shared state. So it works when the pool is busy, has one thread, or runs the caller itself.

#ifndef JAX_PAGED_CPU_PARALLEL_FOR_H_
#define JAX_PAGED_CPU_PARALLEL_FOR_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace jax_paged::cpu {

inline constexpr int kSpins = 2000;  // some microseconds: cheaper than to sleep and be woken

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Items [next, end) are not claimed yet. A cache line of its own, for most claims are one worker's.
struct alignas(64) ItemRange {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// fn(item, worker), or fn(item, worker, next).
template <typename Fn>
void RunItem(const Fn& fn, int64_t item, int64_t worker, int64_t next) {
  if constexpr (std::is_invocable_v<const Fn&, int64_t, int64_t, int64_t>) {
    fn(item, worker, next);
  } else {
    fn(item, worker);
  }
}

// Calls fn(item, worker) for each item in [0, num_items), worker in [0, num_workers); a worker
// number belongs to one thread at a time. `fn` must not throw. `pool` needs Schedule(callable).
// Where it takes a third argument, that is the item that the worker takes next if no other is
// faster, for what is worth a fetch ahead; -1: none is likely.
//
// Each worker has a part of its own first, whose items lie one behind the other in memory: what is
// fetched ahead of one is the next, and of what a call repeats a core finds its part in its caches.
// Or all items begin in_order, as they must where the longest are to be first.
template <typename Pool, typename Fn>
void ParallelFor(Pool& pool, int64_t num_items, int64_t num_workers, const Fn& fn,
                 bool in_order = false) {
  if (num_workers > num_items) num_workers = num_items;
  if (num_workers <= 1) {
    for (int64_t i = 0; i < num_items; ++i) RunItem(fn, i, 0, i + 1 < num_items ? i + 1 : -1);
    return;
  }

  struct State {
    State(const Fn* fn, int64_t num_items, int64_t num_ranges)
        : fn(fn), num_items(num_items), ranges(num_ranges) {
      for (int64_t i = 0; i < num_ranges; ++i) {
        ranges[i].next = num_items * i / num_ranges;
        ranges[i].end = num_items * (i + 1) / num_ranges;
      }
    }

    void Run(int64_t worker) {
      const int64_t num_ranges = static_cast<int64_t>(ranges.size());
      int64_t finished = 0;
      for (int64_t i = 0; i < num_ranges; ++i) {
        ItemRange& range = ranges[(worker + i) % num_ranges];
        while (range.next.load(std::memory_order_relaxed) < range.end) {
          const int64_t item = range.next.fetch_add(1, std::memory_order_relaxed);
          if (item >= range.end) break;
          RunItem(*fn, item, worker, num_ranges > 1 && item + 1 < range.end ? item + 1 : -1);
          ++finished;
        }
      }
      if (finished == 0) return;
      if (done.fetch_add(finished, std::memory_order_acq_rel) + finished == num_items) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
    bool Done() const { return done.load(std::memory_order_acquire) == num_items; }

    const Fn* fn;  // lives in the caller's frame: used only between a claim and `done`
    const int64_t num_items;
    std::vector<ItemRange> ranges;
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto state = std::make_shared<State>(&fn, num_items, in_order ? 1 : num_workers);
  try {
    for (int64_t i = 1; i < num_workers; ++i) pool.Schedule([state, i] { state->Run(i); });
  } catch (...) {
    // No memory for another helper: those that exist and the caller do the work.
  }
  state->Run(/*worker=*/0);
  for (int i = 0; i < kSpins && !state->Done(); ++i) CpuRelax();
  if (!state->Done()) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->all_done.wait(lock, [&] { return state->Done(); });
  }
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_PARALLEL_FOR_H_
