// SPDX-License-Identifier: Apache-2.0

// Barriers and warp collectives: who waits for whom, and what is carried between lanes.

#include <cstring>

#include "emu/state.h"

namespace jax_paged::emu {
namespace {

constexpr int kSwitchWarpOneIn = 16;  // collectives after which another warp may go on

}  // namespace

void SyncThreads(Site site) {
  if (Skips("SyncThreads", site)) return;
  Cta& cta = *machine.cta;
  if (++cta.barrier_arrived < machine.options.num_threads) {
    WaitFor(Waits::kBarrier, cta.barrier_generation, site);
    return;
  }
  cta.barrier_arrived = 0;
  ++cta.barrier_generation;
  OrderCta();
}

void Collective(const char* name, Site site, CollectiveOp op, const void* input,
                int64_t input_bytes, void* output, int64_t output_bytes) {
  Warp& warp = machine.warp();
  const int64_t lane = machine.thread % kWarpSize;
  if (warp.arrived == 0) {
    warp.name = name;
    warp.site = site;
    warp.op = op;
  } else if (warp.site.file != site.file || warp.site.line != site.line || warp.op != op) {
    Fail(site, std::string("divergent warp: lanes at ") + name + " here and at " + warp.name + " " +
                   Text(warp.site));
  }
  if (input_bytes > kMaxLaneBytes || output_bytes > kMaxLaneBytes) Fail(site, "lane data too wide");
  std::memcpy(warp.inputs + lane * input_bytes, input, static_cast<size_t>(input_bytes));
  if (++warp.arrived < kWarpSize) {
    WaitFor(Waits::kCollective, warp.generation, site);
  } else {
    warp.arrived = 0;
    op(site, warp.inputs, warp.outputs);
    ++warp.generation;
    // The outputs stay until all lanes have come back: no lane can arrive 32 times meanwhile.
    if (machine.random() % kSwitchWarpOneIn == 0) Leave(/*any_warp=*/true);
  }
  std::memcpy(output, warp.outputs + lane * output_bytes, static_cast<size_t>(output_bytes));
}

void SyncWarp(Site site) {
  if (Skips("SyncWarp", site)) return;
  char nothing = 0;
  Collective(
      "SyncWarp", site,
      [](Site, const char*, char*) { machine.warp().sync_time = ++machine.clock; }, &nothing, 1,
      &nothing, 1);
}

}  // namespace jax_paged::emu
