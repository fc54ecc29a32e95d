// SPDX-License-Identifier: Apache-2.0

// Shadow of device memory: the buffers, their bounds, results read before they are written, races,
// and what one CTA may see of another's writes.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "emu/state.h"

namespace jax_paged::emu {
namespace {

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
  if (word.launch == 0 && region.is_filled) return;
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

}  // namespace

namespace {
int64_t epoch = 0;
}  // namespace

int64_t RegionsEpoch() { return epoch; }

void ClearRegions() {
  ++epoch;
  for (const auto& region : machine.regions) std::free(region->words);
  machine.regions.clear();
}

Region* AddRegion(const char* name, const void* begin, int64_t bytes, bool is_input,
                  uint8_t* touched) {
  auto region = std::make_unique<Region>();
  region->name = name;
  region->begin = reinterpret_cast<uintptr_t>(begin);
  region->bytes = bytes;
  region->is_input = is_input;
  region->is_filled = false;
  region->touched = touched;
  region->words = nullptr;
  if (!is_input) {
    region->words = static_cast<GlobalWord*>(std::calloc(bytes / 4 + 1, sizeof(GlobalWord)));
  }
  machine.regions.push_back(std::move(region));
  return machine.regions.back().get();
}

void MarkWritten(Region* region, int64_t offset, int64_t bytes) {
  ++machine.launch;
  for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
    region->words[i] = {0, machine.launch, 0, 0, 0};
  }
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
  if (region->touched) std::memset(region->touched + offset, 1, static_cast<size_t>(bytes));
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
  // Threads may write different bytes of one word.
  const uint32_t touched = bytes >= 4 ? 15u : ((1u << bytes) - 1) << (offset % 4);
  for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
    GlobalWord& word = region->words[i];
    const uint32_t before = word.launch == machine.launch ? word.bytes : 0;
    if ((before & touched) && (word.cta != machine.cta->index || !OrderedInCta(word))) {
      Fail(site, "race: write after write of " + AtWord(*region, word, 4 * i));
    }
    word = {machine.clock, machine.launch, machine.cta->index, machine.thread, before | touched};
  }
  return reinterpret_cast<char*>(address);
}

char* AtomicGlobal(uintptr_t address, Region* region, int64_t bytes, Site site) {
  CheckGlobal(address, region, bytes, "atomic", site);
  const int64_t offset = static_cast<int64_t>(address - region->begin);
  for (int64_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) {
    const GlobalWord& word = region->words[i];
    if (word.launch == 0 && !region->is_filled)
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

}  // namespace jax_paged::emu
