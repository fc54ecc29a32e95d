// SPDX-License-Identifier: Apache-2.0

// The state of the emulated machine, shared by the sources of ffi/emu and by nothing else: threads
// and what they wait for (scheduler.cc), barriers and collectives (sync.cc), the shadow of shared
// memory (shared_memory.cc) and of device memory (device_memory.cc).

#ifndef JAX_PAGED_EMU_STATE_H_
#define JAX_PAGED_EMU_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "emu/fiber.h"
#include "emu/machine.h"

namespace jax_paged::emu {

inline constexpr int64_t kMaxLaneBytes = 64;  // input or output of a collective, per lane

// What touched a word: a thread, or one of these.
inline constexpr int32_t kNobody = -1;
inline constexpr int32_t kSeveralWarps = -2;
inline constexpr int32_t kWholeWarp = -16;  // kWholeWarp - w: several lanes of warp w

struct SharedWord {
  uint32_t write_time = 0;
  uint32_t read_time = 0;
  int32_t writer = kNobody;
  int32_t reader = kNobody;
  int32_t in_flight = kNobody;  // the thread whose cp.async will write here
};

struct Copy {
  int64_t target;
  uintptr_t source;
  int bytes;
  bool valid;
  bool done;
};

enum class Waits { kNothing, kCollective, kBarrier, kForever };

struct Lane {
  Fiber fiber;
  Waits waits;
  uint32_t generation;  // of what it waits for
  Site site;
  std::vector<Copy> copies;         // in flight, oldest first
  std::vector<size_t> group_sizes;  // committed groups among them
  // Publication: times of this thread's last fence, of the barrier before that fence (up to which
  // it also covers the writes of other threads), of the last atomic that happened before, and of
  // the last atomic followed by a fence.
  uint32_t fence_time;
  uint32_t fence_covers_others;
  uint32_t atomic_time;
  uint32_t acquire_time;
};

struct Warp {
  int32_t arrived;
  uint32_t generation;
  uint32_t sync_time;
  const char* name;
  Site site;
  CollectiveOp op;
  alignas(16) char inputs[kWarpSize * kMaxLaneBytes];
  alignas(16) char outputs[kWarpSize * kMaxLaneBytes];
};

// What an atomic of a CTA made visible: per thread, writes older than covers[thread].
struct Publication {
  uint32_t time;
  std::vector<uint32_t> covers;
};

struct Cta {
  int32_t index;
  int32_t live_threads;
  int32_t barrier_arrived;
  uint32_t barrier_generation;
  uint32_t barrier_time;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<uint32_t> covered;  // per thread, by fences before the last barrier
  std::unique_ptr<char[]> shared;
  std::vector<SharedWord> words;
  std::unique_ptr<char[]> stacks;
  int64_t shared_bytes = -1;  // of what is allocated, and for how many threads
  int32_t num_stacks = 0;
};

struct Machine {
  std::vector<std::unique_ptr<Region>> regions;
  std::set<std::string> sites;
  Site last_site = {nullptr, 0};  // of `sites`, so that most need no look-up
  std::string skipped_site;

  LaunchOptions options;
  const std::function<void()>* body = nullptr;
  std::mt19937 random;
  int32_t launch = 0;
  uint32_t clock = 0;
  int copy_mode = 0;  // 0: late, 1: early, 2: by chance
  int lane_step = 1;
  std::vector<std::unique_ptr<Cta>> resident;
  std::vector<std::unique_ptr<Cta>> ended;  // of launches before: their memory is used again
  std::vector<std::vector<Publication>> publications;  // per CTA
  std::string error;

  Fiber scheduler;
  Cta* cta = nullptr;
  int32_t thread = 0;

  Lane& lane() { return cta->lanes[thread]; }
  Warp& warp() { return cta->warps[thread / kWarpSize]; }
};

extern Machine machine;

// "name.cuh:12".
std::string Text(Site site);

// Notes that a synchronisation ran; whether it is to be skipped.
bool Skips(const char* kind, Site site);

// Leaves the running fiber for another lane of its warp that can run, else for the scheduler.
void Leave(bool any_warp);

// Leaves the running fiber until `what` is past `generation`.
void WaitFor(Waits what, uint32_t generation, Site site);

// What all threads of the CTA did comes before what they do next.
void OrderCta();

// Fails unless `bytes` at `address` lie within `region` and are aligned.
void CheckGlobal(uintptr_t address, const Region* region, int64_t bytes, const char* what,
                 Site site);

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_STATE_H_
