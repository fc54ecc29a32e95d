// SPDX-License-Identifier: Apache-2.0

// What barriers and fences order.

#include <algorithm>

#include "emu/state.h"

namespace jax_paged::emu {

void OrderCta() {
  Cta& cta = *machine.cta;
  uint32_t covers_others = 0;
  uint32_t atomic_time = 0;
  uint32_t acquire_time = 0;
  for (size_t i = 0; i < cta.lanes.size(); ++i) {
    const Lane& lane = cta.lanes[i];
    cta.covered[i] = std::max(cta.covered[i], lane.fence_time);
    covers_others = std::max(covers_others, lane.fence_covers_others);
    atomic_time = std::max(atomic_time, lane.atomic_time);
    acquire_time = std::max(acquire_time, lane.acquire_time);
  }
  for (size_t i = 0; i < cta.lanes.size(); ++i) {
    cta.covered[i] = std::max(cta.covered[i], covers_others);
    cta.lanes[i].atomic_time = atomic_time;
    cta.lanes[i].acquire_time = acquire_time;
  }
  cta.barrier_time = ++machine.clock;
}

void ThreadFence(Site site) {
  if (Skips("ThreadFence", site)) return;
  Lane& lane = machine.lane();
  lane.fence_time = ++machine.clock;
  lane.fence_covers_others = machine.cta->barrier_time;
  lane.acquire_time = std::max(lane.acquire_time, lane.atomic_time);
}

}  // namespace jax_paged::emu
