// SPDX-License-Identifier: Apache-2.0

// The registers of a warp, and where its lanes are in the program.

#ifndef JAX_PAGED_SIM_WARP_H_
#define JAX_PAGED_SIM_WARP_H_

#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "emu/state.h"
#include "sim/program.h"

namespace jax_paged::sim {

// 16 and 32 bits lie in a word each, 64 bits in two.
template <typename T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
inline T FromSlot(Slot<T> slot) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::bit_cast<T>(slot);
  } else {
    return static_cast<T>(slot);
  }
}
template <typename T>
inline Slot<T> ToSlot(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::bit_cast<Slot<T>>(x);
  } else {
    return static_cast<std::make_unsigned_t<T>>(x);
  }
}

// Lanes at one place in the program.
struct Group {
  int32_t at;
  uint32_t lanes;
  bool waits;  // at an instruction that needs more lanes
};

class Warp {
 public:
  void Start(const Program& program, const char* params, int index, int num_threads, bool overlaps);

  template <typename S>
  S* Words(Ref ref) {
    return reinterpret_cast<S*>(words_.data() + ref.word);
  }
  uint32_t& Predicate(Ref ref) { return words_[ref.word]; }
  // The lanes that have written a register.
  uint32_t& Valid(Ref ref) { return valid_[ref.number]; }
  void SetValid(Ref ref, uint32_t lanes, uint32_t valid) {
    uint32_t& known = valid_[ref.number];
    known = (known & ~lanes) | (valid & lanes);
  }
  // Fails unless the lanes have written the register.
  void Need(Ref ref, uint32_t lanes, const Instruction& instruction, const char* what) {
    if ((valid_[ref.number] & lanes) != lanes) FailUnwritten(instruction, what);
  }
  // Fails unless the launch before this one has ended for the lanes.
  void NeedPrevious(uint32_t lanes, const Instruction& instruction, const char* what) const;
  [[noreturn]] void FailUnwritten(const Instruction& instruction, const char* what) const;

  const char* params = nullptr;  // the kernel's arguments
  const std::vector<Variable>* param_list = nullptr;
  int index = 0;
  uint32_t live = 0;    // lanes that have not ended
  uint32_t waited = 0;  // lanes for which the launch before this one has ended
  std::vector<Group> groups;
  const Instruction* barrier = nullptr;  // of the CTA, where it waits

  emu::Warp& shadow() const;

 private:
  std::vector<uint32_t> words_;
  std::vector<uint32_t> valid_;
};

// Of the instruction, for what emu reports.
inline emu::Site SiteOf(const Instruction& i) { return {i.place.file, i.place.line}; }

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_WARP_H_
