#include "emu/machine.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>

#include "emu/fiber.h"

#ifndef JAX_PAGED_EMU_UCONTEXT
asm(R"(
.text
.globl jax_paged_emu_switch
.type jax_paged_emu_switch,@function
jax_paged_emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size jax_paged_emu_switch,.-jax_paged_emu_switch
)");
#endif

namespace jax_paged::emu {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int64_t kMaxLaneBytes = 64;  // input or output of a collective, per lane
constexpr int kSwitchWarpOneIn = 16;   // collectives after which another warp may go on

// Who touched a word: a thread, or one of these.
constexpr int32_t kNobody = -1;
constexpr int32_t kSeveralWarps = -2;
constexpr int32_t kWholeWarp = -16;  // kWholeWarp - w: several lanes of warp w

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
  std::vector<std::vector<Publication>> publications;  // per CTA
  std::string error;

  Fiber scheduler;
  Cta* cta = nullptr;
  int32_t thread = 0;

  Lane& lane() { return cta->lanes[thread]; }
  Warp& warp() { return cta->warps[thread / kWarpSize]; }
};

Machine machine;

std::string Text(Site site) {
  const std::string path = site.file;
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(site.line);
}

// Notes that a synchronisation ran; whether it is to be skipped.
bool Skips(const char* kind, Site site) {
  if (site.file != machine.last_site.file || site.line != machine.last_site.line) {
    machine.sites.insert(std::string(kind) + " " + Text(site));
    machine.last_site = site;
  }
  return !machine.skipped_site.empty() && machine.skipped_site == Text(site);
}

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

// Leaves the running fiber for another lane of its warp that can run, else for the scheduler.
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

void RunFiber() {
  (*machine.body)();
  Lane& lane = machine.lane();
  if (!lane.copies.empty()) Fail(lane.site, "a thread ended with cp.async copies in flight");
  lane.waits = Waits::kForever;
  --machine.cta->live_threads;
  Leave(/*any_warp=*/false);
}

// ---- shared memory ----

bool Ordered(uint32_t time, int32_t who, bool whole_warp) {
  const Cta& cta = *machine.cta;
  if (who == kNobody || time < cta.barrier_time) return true;
  if (who == kSeveralWarps) return false;
  const int32_t warp = machine.thread / kWarpSize;
  if (who >= 0) {
    if (who == machine.thread && !whole_warp) return true;
    if (who / kWarpSize != warp) return false;
  } else if (kWholeWarp - who != warp) {
    return false;
  }
  return time < cta.warps[warp].sync_time;
}

std::string Name(int32_t who) {
  if (who == kSeveralWarps) return "threads of several warps";
  if (who <= kWholeWarp) return "warp " + std::to_string(kWholeWarp - who);
  return "thread " + std::to_string(who);
}

SharedWord* Words(int64_t offset, int64_t bytes, const char* what, Site site) {
  if (offset < 0 || offset + bytes > machine.options.shared_bytes) {
    Fail(site, std::string(what) + " of shared memory out of bounds: byte " +
                   std::to_string(offset) + " of " + std::to_string(machine.options.shared_bytes));
  }
  if (bytes % 4 || offset % bytes) {
    Fail(site, std::string(what) + " of shared memory misaligned: byte " + std::to_string(offset));
  }
  return &machine.cta->words[offset / 4];
}

[[noreturn]] void FailRace(Site site, const char* what, int64_t offset, int32_t who) {
  Fail(site, std::string("race: ") + what + ", with no barrier between: shared byte " +
                 std::to_string(offset) + ", " + Name(who) + " and thread " +
                 std::to_string(machine.thread));
}

void NoteRead(SharedWord* word, bool whole_warp, int64_t offset, Site site) {
  if (word->in_flight != kNobody) {
    Fail(site, "read of shared byte " + std::to_string(offset) + " while the cp.async of " +
                   Name(word->in_flight) + " is in flight");
  }
  if (word->writer == kNobody) {
    Fail(site, "read of shared byte " + std::to_string(offset) + ", which nobody has written");
  }
  if (!Ordered(word->write_time, word->writer, whole_warp)) {
    FailRace(site, "read after write", offset, word->writer);
  }
  const Cta& cta = *machine.cta;
  const int32_t warp = machine.thread / kWarpSize;
  const int32_t me = whole_warp ? kWholeWarp - warp : machine.thread;
  const bool counts = word->reader != kNobody && word->read_time >= cta.barrier_time;
  if (!counts) {
    word->reader = me;
  } else if (word->reader != me) {
    const int32_t other = word->reader;
    const int32_t other_warp = other >= 0 ? other / kWarpSize : kWholeWarp - other;
    if (other == kSeveralWarps || other_warp != warp) {
      word->reader = kSeveralWarps;
    } else if (word->read_time >= cta.warps[warp].sync_time) {
      word->reader = kWholeWarp - warp;
    } else {
      word->reader = me;
    }
  }
  word->read_time = machine.clock;
}

void CheckWrite(const SharedWord& word, int64_t offset, Site site) {
  if (word.in_flight != kNobody) {
    Fail(site, "write to shared byte " + std::to_string(offset) + " while the cp.async of " +
                   Name(word.in_flight) + " is in flight");
  }
  if (!Ordered(word.write_time, word.writer, /*whole_warp=*/false)) {
    FailRace(site, "write after write", offset, word.writer);
  }
  if (!Ordered(word.read_time, word.reader, /*whole_warp=*/false)) {
    FailRace(site, "write after read", offset, word.reader);
  }
}

void NoteWrite(SharedWord* word) {
  word->writer = machine.thread;
  word->write_time = machine.clock;
}

char* ReadSharedAs(int64_t offset, int64_t bytes, bool whole_warp, Site site) {
  SharedWord* words = Words(offset, bytes, "read", site);
  for (int64_t i = 0; i < bytes / 4; ++i) NoteRead(words + i, whole_warp, offset + 4 * i, site);
  return machine.cta->shared.get() + offset;
}

// ---- device memory ----

void CheckGlobal(uintptr_t address, const Region* region, int64_t bytes, const char* what,
                 Site site) {
  if (region == nullptr) Fail(site, std::string(what) + " through a pointer to no known buffer");
  const int64_t offset = static_cast<int64_t>(address - region->begin);
  if (offset < 0 || offset + bytes > region->bytes) {
    Fail(site, std::string(what) + " of " + region->name + " out of bounds: byte " +
                   std::to_string(offset) + " of " + std::to_string(region->bytes));
  }
  if (address % static_cast<uintptr_t>(bytes)) {
    Fail(site, std::string(what) + " of " + region->name + " misaligned: byte " +
                   std::to_string(offset) + ", " + std::to_string(bytes) + " wide");
  }
}

// Whether a write by a thread of this CTA happened before now.
bool OrderedInCta(const GlobalWord& word) {
  const Cta& cta = *machine.cta;
  const int32_t warp = machine.thread / kWarpSize;
  return word.thread == machine.thread || word.time < cta.barrier_time ||
         (word.thread / kWarpSize == warp && word.time < cta.warps[warp].sync_time);
}

std::string AtWord(const Region& region, const GlobalWord& word, int64_t offset) {
  return region.name + " byte " + std::to_string(offset) + ", written by CTA " +
         std::to_string(word.cta) + " thread " + std::to_string(word.thread);
}

void CheckVisible(const Region& region, const GlobalWord& word, int64_t offset, Cache cache,
                  Site site) {
  if (word.launch == 0) {
    Fail(site, "read of " + region.name + " byte " + std::to_string(offset) +
                   ", which nobody has written");
  }
  if (word.launch != machine.launch) return;
  if (word.cta == machine.cta->index) {
    if (!OrderedInCta(word))
      Fail(site, "race: read after write of " + AtWord(region, word, offset));
    if (cache == Cache::kReadOnly) {
      Fail(site, "read-only load of what this launch wrote: " + AtWord(region, word, offset));
    }
    return;
  }
  if (cache != Cache::kL2) {
    Fail(site, "a load that L1 may serve, of " + AtWord(region, word, offset));
  }
  for (const Publication& publication : machine.publications[word.cta]) {
    if (publication.covers[word.thread] <= word.time) continue;
    if (publication.time <= machine.lane().acquire_time) return;
    Fail(site, "not acquired (no fence after the atomic?): " + AtWord(region, word, offset));
  }
  Fail(site, "not published (no fence before the atomic?): " + AtWord(region, word, offset));
}

void Finish(Copy* copy) {
  if (copy->done) return;
  copy->done = true;
  char* target = machine.cta->shared.get() + copy->target;
  if (copy->valid) {
    std::memcpy(target, reinterpret_cast<const void*>(copy->source), 16);
  } else {
    std::memset(target, 0, 16);
  }
}

// ---- launch ----

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
  if (!cta->shared) cta->shared.reset(new char[options.shared_bytes + 1]);
  std::memset(cta->shared.get(), 0xff, options.shared_bytes);
  cta->words.assign(options.shared_bytes / 4, SharedWord());
  if (!cta->stacks) cta->stacks.reset(new char[kStackBytes * options.num_threads]);
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
  std::set<std::string> places;
  for (const auto& cta : machine.resident) {
    if (cta->live_threads == 0) continue;
    for (size_t i = 0; i < cta->lanes.size(); ++i) {
      const Lane& lane = cta->lanes[i];
      const std::string warp =
          "CTA " + std::to_string(cta->index) + " warp " + std::to_string(i / kWarpSize) + ": ";
      if (lane.waits == Waits::kForever) places.insert(warp + "threads that ended");
      if (lane.waits == Waits::kBarrier) {
        places.insert(warp + "threads at the barrier " + Text(lane.site));
      }
      if (lane.waits == Waits::kCollective) {
        places.insert(warp + "threads at the collective " + Text(lane.site));
      }
    }
  }
  std::string text = "deadlock:";
  for (const std::string& place : places) text += " [" + place + "]";
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

void ClearRegions() {
  for (const auto& region : machine.regions) std::free(region->words);
  machine.regions.clear();
}

void AddRegion(const char* name, const void* begin, int64_t bytes, bool is_input) {
  auto region = std::make_unique<Region>();
  region->name = name;
  region->begin = reinterpret_cast<uintptr_t>(begin);
  region->bytes = bytes;
  region->is_input = is_input;
  region->words = nullptr;
  if (!is_input) {
    region->words = static_cast<GlobalWord*>(std::calloc(bytes / 4 + 1, sizeof(GlobalWord)));
  }
  machine.regions.push_back(std::move(region));
}

Region* FindRegion(uintptr_t address) {
  for (const auto& region : machine.regions) {
    if (address >= region->begin &&
        address - region->begin < static_cast<uintptr_t>(region->bytes)) {
      return region.get();
    }
  }
  return nullptr;
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

  // CTAs wait in the shuffled order for one of a few places.
  const size_t places = std::min<size_t>(1 + options.seed % 4, order.size());
  machine.resident.clear();
  size_t started = 0;
  for (; started < places; ++started) {
    machine.resident.push_back(std::make_unique<Cta>());
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

void SyncThreads(Site site) {
  if (Skips("SyncThreads", site)) return;
  Cta& cta = *machine.cta;
  if (++cta.barrier_arrived < machine.options.num_threads) {
    WaitFor(Waits::kBarrier, cta.barrier_generation, site);
    return;
  }
  cta.barrier_arrived = 0;
  ++cta.barrier_generation;
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

char* ReadShared(int64_t offset, int64_t bytes, Site site) {
  return ReadSharedAs(offset, bytes, /*whole_warp=*/false, site);
}

char* ReadSharedByWarp(int64_t offset, int64_t bytes, Site site) {
  return ReadSharedAs(offset, bytes, /*whole_warp=*/true, site);
}

char* WriteShared(int64_t offset, int64_t bytes, Site site) {
  SharedWord* words = Words(offset, bytes, "write", site);
  for (int64_t i = 0; i < bytes / 4; ++i) {
    CheckWrite(words[i], offset + 4 * i, site);
    NoteWrite(words + i);
  }
  return machine.cta->shared.get() + offset;
}

const char* ReadGlobal(uintptr_t address, const Region* region, int64_t bytes, Cache cache,
                       Site site) {
  CheckGlobal(address, region, bytes, "read", site);
  if (!region->is_input) {
    const int64_t offset = static_cast<int64_t>(address - region->begin);
    for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
      CheckVisible(*region, region->words[i], 4 * i, cache, site);
    }
  }
  return reinterpret_cast<const char*>(address);
}

char* WriteGlobal(uintptr_t address, Region* region, int64_t bytes, Site site) {
  CheckGlobal(address, region, bytes, "write", site);
  if (region->is_input) Fail(site, "write to the input " + region->name);
  const int64_t offset = static_cast<int64_t>(address - region->begin);
  for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
    GlobalWord& word = region->words[i];
    if (word.launch == machine.launch && (word.cta != machine.cta->index || !OrderedInCta(word))) {
      Fail(site, "race: write after write of " + AtWord(*region, word, 4 * i));
    }
    word = {machine.clock, machine.launch, machine.cta->index, machine.thread};
  }
  return reinterpret_cast<char*>(address);
}

char* AtomicGlobal(uintptr_t address, Region* region, int64_t bytes, Site site) {
  CheckGlobal(address, region, bytes, "atomic", site);
  const int64_t offset = static_cast<int64_t>(address - region->begin);
  for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
    const GlobalWord& word = region->words[i];
    if (word.launch == 0)
      Fail(site, "atomic on " + region->name + ", which nobody has initialised");
    if (word.launch == machine.launch) {
      Fail(site, "race: atomic on " + AtWord(*region, word, 4 * i) + " in the same launch");
    }
  }
  Lane& lane = machine.lane();
  Publication publication = {++machine.clock, machine.cta->covered};
  for (size_t i = 0; i < publication.covers.size(); ++i) {
    const bool own = static_cast<int32_t>(i) == machine.thread;
    const uint32_t fence = own ? lane.fence_time : lane.fence_covers_others;
    publication.covers[i] = std::max(publication.covers[i], fence);
  }
  machine.publications[machine.cta->index].push_back(std::move(publication));
  lane.atomic_time = machine.clock;
  return reinterpret_cast<char*>(address);
}

void CpAsync16(int64_t shared_offset, uintptr_t address, const Region* region, bool valid,
               Site site) {
  if (valid) {
    CheckGlobal(address, region, 16, "cp.async", site);
    if (!region->is_input) Fail(site, "cp.async from " + region->name + ", which is no input");
  } else if (address % 16) {
    Fail(site, "cp.async from a misaligned address");
  }
  SharedWord* words = Words(shared_offset, 16, "cp.async", site);
  for (int i = 0; i < 4; ++i) {
    CheckWrite(words[i], shared_offset + 4 * i, site);
    words[i].in_flight = machine.thread;
  }
  std::memset(machine.cta->shared.get() + shared_offset, 0xff, 16);
  Lane& lane = machine.lane();
  lane.site = site;
  lane.copies.push_back({shared_offset, address, valid, /*done=*/false});
  if (machine.copy_mode == 1 || (machine.copy_mode == 2 && machine.random() % 2)) {
    Finish(&lane.copies.back());
  }
}

void CpAsyncCommit() {
  Lane& lane = machine.lane();
  size_t committed = 0;
  for (const size_t size : lane.group_sizes) committed += size;
  lane.group_sizes.push_back(lane.copies.size() - committed);
}

void CpAsyncWait(int groups_in_flight, Site site) {
  if (Skips("CpAsyncWait", site)) ++groups_in_flight;
  Lane& lane = machine.lane();
  size_t copies = 0;
  size_t groups = 0;
  while (lane.group_sizes.size() - groups > static_cast<size_t>(groups_in_flight)) {
    copies += lane.group_sizes[groups++];
  }
  for (size_t i = 0; i < copies; ++i) {
    Copy& copy = lane.copies[i];
    Finish(&copy);
    SharedWord* words = &machine.cta->words[copy.target / 4];
    for (int w = 0; w < 4; ++w) {
      words[w].in_flight = kNobody;
      NoteWrite(words + w);
    }
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<int64_t>(copies));
  lane.group_sizes.erase(lane.group_sizes.begin(),
                         lane.group_sizes.begin() + static_cast<int64_t>(groups));
}

}  // namespace jax_paged::emu
