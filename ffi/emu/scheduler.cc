// SPDX-License-Identifier: Apache-2.0

// Which thread goes on: fibers that wait for a collective or a barrier, and the launch that runs
// them all, CTAs, warps and lanes in an order drawn from the seed.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "emu/state.h"

namespace jax_paged::emu {
namespace {

constexpr size_t kStackBytes = 128 << 10;

bool CanRun(const Cta& cta, int32_t thread) {
  const Lane& lane = cta.lanes[thread];
  switch (lane.waits) {
    case Waits::kNothing:
      return true;
    case Waits::kCollective:
      return cta.warps[thread / kWarpSize].generation != lane.generation;
    case Waits::kBarrier:
      return cta.barrier_generation != lane.generation;
    case Waits::kForever:
      return false;
  }
  return false;
}

void RunFiber() {
  (*machine.body)();
  Lane& lane = machine.lane();
  if (!lane.copies.empty()) Fail(lane.site, "a thread ended with cp.async copies in flight");
  lane.waits = Waits::kForever;
  --machine.cta->live_threads;
  Leave(/*any_warp=*/false);
}

void StartCta(Cta* cta, int32_t index) {
  const LaunchOptions& options = machine.options;
  cta->index = index;
  cta->live_threads = options.num_threads;
  cta->barrier_arrived = 0;
  cta->barrier_generation = 0;
  cta->barrier_time = 0;
  cta->covered.assign(options.num_threads, 0);
  cta->warps.resize(options.num_threads / kWarpSize);
  for (Warp& warp : cta->warps) warp.arrived = warp.generation = warp.sync_time = 0;
  if (cta->shared_bytes < options.shared_bytes) {
    cta->shared.reset(new char[options.shared_bytes + 1]);
    cta->shared_bytes = options.shared_bytes;
  }
  std::memset(cta->shared.get(), 0xff, options.shared_bytes);
  cta->words.assign(options.shared_bytes / 4, SharedWord());
  if (cta->num_stacks < options.num_threads) {
    cta->stacks.reset(new char[kStackBytes * options.num_threads]);
    cta->num_stacks = options.num_threads;
  }
  cta->lanes.resize(options.num_threads);
  for (int32_t i = 0; i < options.num_threads; ++i) {
    Lane& lane = cta->lanes[i];
    lane.waits = Waits::kNothing;
    lane.site = {"?", 0};
    lane.copies.clear();
    lane.group_sizes.clear();
    lane.fence_time = lane.fence_covers_others = lane.atomic_time = lane.acquire_time = 0;
    StartFiber(&lane.fiber, cta->stacks.get() + kStackBytes * i, kStackBytes, RunFiber);
  }
}

std::string DeadlockText() {
  std::set<std::string> waits;
  for (const auto& cta : machine.resident) {
    if (cta->live_threads == 0) continue;
    for (size_t i = 0; i < cta->lanes.size(); ++i) {
      const Lane& lane = cta->lanes[i];
      const std::string warp =
          "CTA " + std::to_string(cta->index) + " warp " + std::to_string(i / kWarpSize) + ": ";
      if (lane.waits == Waits::kForever) waits.insert(warp + "threads that ended");
      if (lane.waits == Waits::kBarrier) {
        waits.insert(warp + "threads at the barrier " + Text(lane.site));
      }
      if (lane.waits == Waits::kCollective) {
        waits.insert(warp + "threads at the collective " + Text(lane.site));
      }
    }
  }
  std::string text = "deadlock:";
  for (const std::string& wait : waits) text += " [" + wait + "]";
  return text.substr(0, 1000);
}

// Goes on with some thread that can run; false when there is none.
bool RunSome() {
  struct Choice {
    Cta* cta;
    int32_t warp;
  };
  std::vector<Choice> choices;
  for (const auto& cta : machine.resident) {
    if (cta->live_threads == 0) continue;
    for (int32_t w = 0; w < static_cast<int32_t>(cta->warps.size()); ++w)
      choices.push_back({cta.get(), w});
  }
  while (!choices.empty()) {
    const size_t pick = machine.random() % choices.size();
    const Choice choice = choices[pick];
    const int32_t first = static_cast<int32_t>(machine.random() % kWarpSize);
    for (int32_t i = 0; i < kWarpSize; ++i) {
      const int32_t thread = choice.warp * kWarpSize + (first + i) % kWarpSize;
      if (!CanRun(*choice.cta, thread)) continue;
      machine.cta = choice.cta;
      machine.thread = thread;
      SwitchFiber(&machine.scheduler, &choice.cta->lanes[thread].fiber);
      return true;
    }
    choices[pick] = choices.back();
    choices.pop_back();
  }
  return false;
}

}  // namespace

Machine machine;

std::string Text(Site site) {
  const std::string path = site.file;
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(site.line);
}

bool Skips(const char* kind, Site site) {
  if (site.file != machine.last_site.file || site.line != machine.last_site.line) {
    machine.sites.insert(std::string(kind) + " " + Text(site));
    machine.last_site = site;
  }
  return !machine.skipped_site.empty() && machine.skipped_site == Text(site);
}

void Leave(bool any_warp) {
  const int32_t self = machine.thread;
  Cta* const cta = machine.cta;
  Lane& lane = machine.lane();
  const int32_t warp_begin = self / kWarpSize * kWarpSize;
  Fiber* next = &machine.scheduler;
  for (int i = 1; i < kWarpSize && !any_warp; ++i) {
    const int32_t other = warp_begin + (self + i * machine.lane_step) % kWarpSize;
    if (CanRun(*cta, other)) {
      machine.thread = other;
      next = &cta->lanes[other].fiber;
      break;
    }
  }
  SwitchFiber(&lane.fiber, next);
  // Whoever came here has set machine.cta and machine.thread.
}

void WaitFor(Waits what, uint32_t generation, Site site) {
  Lane& lane = machine.lane();
  lane.waits = what;
  lane.generation = generation;
  lane.site = site;
  const int32_t self = machine.thread;
  Cta* const cta = machine.cta;
  while (!CanRun(*cta, self)) Leave(/*any_warp=*/false);
  lane.waits = Waits::kNothing;
}

std::string Launch(const LaunchOptions& options, const std::function<void()>& body) {
  machine.options = options;
  machine.body = &body;
  machine.random.seed(options.seed);
  ++machine.launch;
  machine.clock = 1;
  machine.copy_mode = static_cast<int>(options.seed % 3);
  machine.lane_step = 1 + 2 * static_cast<int>(machine.random() % (kWarpSize / 2));
  machine.error.clear();
  machine.publications.assign(options.num_ctas, {});
  std::vector<int32_t> order(options.num_ctas);
  for (int32_t i = 0; i < options.num_ctas; ++i) order[i] = i;
  if (options.seed) std::shuffle(order.begin(), order.end(), machine.random);

  // A few CTAs run at a time; the others wait, in the shuffled order, for one of those to end.
  const size_t resident = std::min<size_t>(1 + options.seed % 4, order.size());
  size_t started = 0;
  for (; started < resident; ++started) {
    if (machine.ended.empty()) machine.ended.push_back(std::make_unique<Cta>());
    machine.resident.push_back(std::move(machine.ended.back()));
    machine.ended.pop_back();
    StartCta(machine.resident.back().get(), order[started]);
  }
  while (true) {
    bool live = false;
    for (const auto& cta : machine.resident) {
      if (cta->live_threads == 0 && started < order.size()) StartCta(cta.get(), order[started++]);
      live |= cta->live_threads > 0;
    }
    if (!live) break;
    if (!RunSome()) machine.error = DeadlockText();
    if (!machine.error.empty()) break;
  }
  for (auto& cta : machine.resident) machine.ended.push_back(std::move(cta));
  machine.resident.clear();
  machine.body = nullptr;
  return machine.error;
}

void SkipSite(const std::string& site) { machine.skipped_site = site; }

std::vector<std::string> TakeSites() {
  std::vector<std::string> sites(machine.sites.begin(), machine.sites.end());
  machine.sites.clear();
  machine.last_site = {nullptr, 0};
  return sites;
}

void Fail(Site site, const std::string& what) {
  machine.error = Text(site) + ": " + what + " (CTA " + std::to_string(machine.cta->index) +
                  ", thread " + std::to_string(machine.thread) + ")";
  // The scheduler stops the launch; this fiber is never entered again.
  SwitchFiber(&machine.lane().fiber, &machine.scheduler);
  std::abort();
}

int32_t ThreadIndex() { return machine.thread; }
int32_t BlockIndex() { return machine.cta->index; }
int32_t GridSize() { return machine.options.num_ctas; }

}  // namespace jax_paged::emu
