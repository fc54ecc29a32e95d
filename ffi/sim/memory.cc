// SPDX-License-Identifier: Apache-2.0

// Loads, stores, atomics, fences, cp.async and griddepcontrol. Shadow memory (emu/) says which of
// them are wrong.

#include <cstring>
#include <stdexcept>

#include "emu/state.h"
#include "sim/rules.h"
#include "sim/warp.h"

namespace jax_paged::sim {
namespace {

enum class Space { kParam, kShared, kGlobal };

// Calls f(lane) as each of the threads.
template <typename F>
inline void EachLane(const Warp& warp, uint32_t lanes, F f) {
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    emu::machine.thread = warp.index * kLanes + lane;
    f(lane);
  }
}

// Addresses lie in one or in two words: Instruction::choice, beside which cache may serve.
constexpr int kWideAddress = 4;

inline uint64_t AddressOf(Warp& warp, const Instruction& i, int lane) {
  const uint64_t base = i.choice & kWideAddress ? warp.Words<uint64_t>(i.in[0])[lane]
                                                : warp.Words<uint32_t>(i.in[0])[lane];
  return base + static_cast<uint64_t>(i.number);
}

emu::Region* RegionOf(uint64_t address) {
  static emu::Region* last = nullptr;
  static int64_t epoch = -1;
  if (epoch != emu::RegionsEpoch()) last = nullptr;
  epoch = emu::RegionsEpoch();
  if (last == nullptr || address - last->begin >= static_cast<uint64_t>(last->bytes)) {
    last = emu::FindRegion(address);
  }
  return last;
}

const char* ReadParam(const Warp& warp, const Instruction& i, uint64_t address) {
  int64_t end = 0;
  for (const Variable& param : *warp.param_list) end = param.offset + param.bytes;
  if (static_cast<int64_t>(address) < 0 || static_cast<int64_t>(address) + i.bytes > end) {
    emu::Fail(SiteOf(i), "read of kernel arguments out of bounds: byte " +
                             std::to_string(static_cast<int64_t>(address)) + " of " +
                             std::to_string(end));
  }
  return warp.params + address;
}

template <Space SPACE>
const char* ReadFrom(Warp& warp, const Instruction& i, uint64_t address) {
  const emu::Site site = SiteOf(i);
  if constexpr (SPACE == Space::kParam) return ReadParam(warp, i, address);
  if constexpr (SPACE == Space::kShared) {
    return emu::ReadShared(static_cast<int64_t>(address), i.bytes, site);
  }
  return emu::ReadGlobal(address, RegionOf(address), i.bytes, static_cast<emu::Cache>(i.choice & 3),
                         site);
}

// Each of the registers gets an element, widened as its type says.
template <Space SPACE, typename T, typename S>
void Load(Warp& warp, const Instruction& i, uint32_t lanes) {
  warp.Need(i.in[0], lanes, i, "an address");
  if constexpr (SPACE == Space::kGlobal) warp.NeedPrevious(lanes, i, "a read");
  EachLane(warp, lanes, [&](int lane) {
    const char* from = ReadFrom<SPACE>(warp, i, AddressOf(warp, i, lane));
    for (int k = 0; k < i.num_out; ++k, from += sizeof(T)) {
      T x;
      std::memcpy(&x, from, sizeof(T));
      warp.Words<S>(i.out[k])[lane] = static_cast<S>(x);
    }
  });
  for (int k = 0; k < i.num_out; ++k) warp.SetValid(i.out[k], lanes, kAllLanes);
}

template <Space SPACE, typename T>
void Store(Warp& warp, const Instruction& i, uint32_t lanes) {
  warp.Need(i.in[0], lanes, i, "an address");
  for (int k = 1; k < i.num_in; ++k) warp.Need(i.in[k], lanes, i, "what is stored");
  if constexpr (SPACE == Space::kGlobal) warp.NeedPrevious(lanes, i, "a write");
  EachLane(warp, lanes, [&](int lane) {
    const uint64_t address = AddressOf(warp, i, lane);
    char* to;
    if constexpr (SPACE == Space::kShared) {
      to = emu::WriteShared(static_cast<int64_t>(address), i.bytes, SiteOf(i));
    } else {
      to = emu::WriteGlobal(address, RegionOf(address), i.bytes, SiteOf(i));
    }
    for (int k = 1; k < i.num_in; ++k, to += sizeof(T)) {
      const T x = static_cast<T>(warp.Words<Slot<T>>(i.in[k])[lane]);
      std::memcpy(to, &x, sizeof(T));
    }
  });
}

template <Space SPACE, typename S>
Execute LoadOf(const std::string& type) {
  if (type == "u8" || type == "b8") return Load<SPACE, uint8_t, S>;
  if (type == "s8") return Load<SPACE, int8_t, S>;
  if (type == "u16" || type == "b16") return Load<SPACE, uint16_t, S>;
  if (type == "s16") return Load<SPACE, int16_t, S>;
  if (type == "u32" || type == "b32" || type == "f32") return Load<SPACE, uint32_t, S>;
  if (type == "s32") return Load<SPACE, int32_t, S>;
  if (type == "u64" || type == "b64" || type == "s64") return Load<SPACE, uint64_t, uint64_t>;
  return nullptr;
}

template <Space SPACE>
Execute StoreOf(int bits) {
  switch (bits) {
    case 8:
      return Store<SPACE, uint8_t>;
    case 16:
      return Store<SPACE, uint16_t>;
    case 32:
      return Store<SPACE, uint32_t>;
    case 64:
      return Store<SPACE, uint64_t>;
    default:
      return nullptr;
  }
}

// out[0] = the old value; the new one is what `next` makes of it and of the operands in[1] …, which
// are looked up by their number and lane.
template <typename Next>
void Atomic(Warp& warp, const Instruction& i, uint32_t lanes, Next next) {
  warp.Need(i.in[0], lanes, i, "an address");
  for (int k = 1; k < i.num_in; ++k) warp.Need(i.in[k], lanes, i, "an operand of an atomic");
  warp.NeedPrevious(lanes, i, "an atomic");
  EachLane(warp, lanes, [&](int lane) {
    const uint64_t address = AddressOf(warp, i, lane);
    char* const where = emu::AtomicGlobal(address, RegionOf(address), 4, SiteOf(i));
    uint32_t old;
    std::memcpy(&old, where, sizeof(old));
    const uint32_t made = next(old, [&](int k) { return warp.Words<uint32_t>(i.in[k])[lane]; });
    std::memcpy(where, &made, sizeof(made));
    warp.Words<uint32_t>(i.out[0])[lane] = old;
  });
  warp.SetValid(i.out[0], lanes, kAllLanes);
}
// old + 1, or 0 after the limit.
void AtomicIncrement(Warp& warp, const Instruction& i, uint32_t lanes) {
  Atomic(warp, i, lanes,
         [](uint32_t old, const auto& operand) { return old >= operand(1) ? 0 : old + 1; });
}
void AtomicCompareAndSwap(Warp& warp, const Instruction& i, uint32_t lanes) {
  Atomic(warp, i, lanes,
         [](uint32_t old, const auto& operand) { return old == operand(1) ? operand(2) : old; });
}
void AtomicMax(Warp& warp, const Instruction& i, uint32_t lanes) {
  Atomic(warp, i, lanes, [](uint32_t old, const auto& operand) {
    return static_cast<int32_t>(operand(1)) > static_cast<int32_t>(old) ? operand(1) : old;
  });
}

void Fence(Warp& warp, const Instruction& i, uint32_t lanes) {
  EachLane(warp, lanes, [&](int) { emu::ThreadFence(SiteOf(i)); });
}

// in: the address in shared memory, the one in global memory, how many bytes are read.
void CopyAsync(Warp& warp, const Instruction& i, uint32_t lanes) {
  for (int k = 0; k < i.num_in; ++k) warp.Need(i.in[k], lanes, i, "an operand of cp.async");
  warp.NeedPrevious(lanes, i, "cp.async");
  EachLane(warp, lanes, [&](int lane) {
    const uint32_t to = warp.Words<uint32_t>(i.in[0])[lane] + static_cast<uint32_t>(i.number);
    const uint64_t from = warp.Words<uint64_t>(i.in[1])[lane] + static_cast<uint64_t>(i.number2);
    const int32_t read =
        i.num_in > 2 ? static_cast<int32_t>(warp.Words<uint32_t>(i.in[2])[lane]) : i.bytes;
    if (read != 0 && read != i.bytes) {
      emu::Fail(SiteOf(i), "cp.async of " + std::to_string(i.bytes) + " bytes that reads " +
                               std::to_string(read));
    }
    emu::CpAsync(to, from, RegionOf(from), i.bytes, read != 0, SiteOf(i));
  });
}
void CommitGroup(Warp& warp, const Instruction&, uint32_t lanes) {
  EachLane(warp, lanes, [](int) { emu::CpAsyncCommit(); });
}
void WaitGroup(Warp& warp, const Instruction& i, uint32_t lanes) {
  EachLane(warp, lanes, [&](int) { emu::CpAsyncWait(static_cast<int>(i.number), SiteOf(i)); });
}

void WaitForPrevious(Warp& warp, const Instruction&, uint32_t lanes) { warp.waited |= lanes; }
// Launches run one behind another here, as they may.
void AllowNext(Warp&, const Instruction&, uint32_t) {}

}  // namespace

bool MakeMemoryAccess(const std::string& opcode, int address_bits, int register_bits, int elements,
                      Instruction* i) {
  const auto begins = [&](const char* text) { return opcode.rfind(text, 0) == 0; };
  const std::string type = opcode.substr(opcode.find_last_of('.') + 1);
  i->choice = address_bits == 64 ? kWideAddress : 0;
  const auto none_of_others = [&](const std::string& expected) {
    std::string vector = elements > 1 ? ".v" + std::to_string(elements) : "";
    return opcode == expected + vector + "." + type;
  };
  if (begins("ld.") || begins("st.")) {
    i->bytes = TypeBits(type) / 8 * elements;
    const bool wide = register_bits == 64;
    if (none_of_others("ld.param")) {
      i->execute =
          wide ? LoadOf<Space::kParam, uint64_t>(type) : LoadOf<Space::kParam, uint32_t>(type);
    } else if (none_of_others("ld.shared")) {
      i->execute =
          wide ? LoadOf<Space::kShared, uint64_t>(type) : LoadOf<Space::kShared, uint32_t>(type);
    } else if (none_of_others("st.shared")) {
      i->execute = StoreOf<Space::kShared>(TypeBits(type));
    } else if (none_of_others("st.global")) {
      i->execute = StoreOf<Space::kGlobal>(TypeBits(type));
    } else {
      const emu::Cache cache = begins("ld.global.nc.")   ? emu::Cache::kReadOnly
                               : begins("ld.global.cg.") ? emu::Cache::kL2
                                                         : emu::Cache::kAny;
      const char* const name = cache == emu::Cache::kReadOnly ? "ld.global.nc"
                               : cache == emu::Cache::kL2     ? "ld.global.cg"
                                                              : "ld.global";
      if (!none_of_others(name)) return false;
      i->choice |= static_cast<int>(cache);
      i->execute =
          wide ? LoadOf<Space::kGlobal, uint64_t>(type) : LoadOf<Space::kGlobal, uint32_t>(type);
    }
    return i->execute != nullptr;
  }
  if (opcode == "atom.global.inc.u32") {
    i->execute = AtomicIncrement;
  } else if (opcode == "atom.global.cas.b32") {
    i->execute = AtomicCompareAndSwap;
  } else if (opcode == "atom.global.max.s32") {
    i->execute = AtomicMax;
  } else if (opcode == "fence.acq_rel.gpu") {
    i->execute = Fence;
  } else if (opcode == "cp.async.cg.shared.global.L2::128B" ||
             opcode == "cp.async.ca.shared.global") {
    i->execute = CopyAsync;
  } else if (opcode == "cp.async.commit_group") {
    i->execute = CommitGroup;
  } else if (opcode == "cp.async.wait_group") {
    i->execute = WaitGroup;
  } else if (opcode == "griddepcontrol.wait") {
    i->execute = WaitForPrevious;
  } else if (opcode == "griddepcontrol.launch_dependents") {
    i->execute = AllowNext;
  }
  return i->execute != nullptr;
}

}  // namespace jax_paged::sim
