// SPDX-License-Identifier: Apache-2.0

// Shadow of shared memory: bounds, words read before they are written, races, and cp.async copies
// with everything that touches their destination too early.

#include <cstring>
#include <memory>

#include "emu/state.h"

namespace jax_paged::emu {
namespace {

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

void Finish(Copy* copy) {
  if (copy->done) return;
  copy->done = true;
  char* target = machine.cta->shared.get() + copy->target;
  if (copy->valid) {
    std::memcpy(target, reinterpret_cast<const void*>(copy->source), copy->bytes);
  } else {
    std::memset(target, 0, copy->bytes);
  }
}

}  // namespace

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

void CpAsync(int64_t shared_offset, uintptr_t address, const Region* region, int bytes, bool valid,
             Site site) {
  if (valid) {
    CheckGlobal(address, region, bytes, "cp.async", site);
    // Of what an earlier launch wrote: nothing orders a copy with writes of this one.
    if (!region->is_input) ReadGlobal(address, region, bytes, Cache::kReadOnly, site);
  } else if (address % bytes) {
    Fail(site, "cp.async from a misaligned address");
  }
  SharedWord* words = Words(shared_offset, bytes, "cp.async", site);
  for (int i = 0; i < bytes / 4; ++i) {
    CheckWrite(words[i], shared_offset + 4 * i, site);
    words[i].in_flight = machine.thread;
  }
  std::memset(machine.cta->shared.get() + shared_offset, 0xff, bytes);
  Lane& lane = machine.lane();
  lane.site = site;
  lane.copies.push_back({shared_offset, address, bytes, valid, /*done=*/false});
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
    for (int w = 0; w < copy.bytes / 4; ++w) {
      words[w].in_flight = kNobody;
      NoteWrite(words + w);
    }
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<int64_t>(copies));
  lane.group_sizes.erase(lane.group_sizes.begin(),
                         lane.group_sizes.begin() + static_cast<int64_t>(groups));
}

}  // namespace jax_paged::emu
