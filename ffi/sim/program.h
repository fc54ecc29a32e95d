// SPDX-License-Identifier: Apache-2.0

// A kernel ready to run: instructions with functions that execute them for the lanes of a warp.

#ifndef JAX_PAGED_SIM_PROGRAM_H_
#define JAX_PAGED_SIM_PROGRAM_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sim/ptx.h"

namespace jax_paged::sim {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = ~uint32_t{0};

// A register: where its 32 lanes lie among the words of a warp, and its number. Of a predicate the
// one word has a bit for each lane. Immediates and special registers are registers too.
struct Ref {
  uint32_t word;
  uint32_t number;
};

class Warp;
struct Instruction;
using Execute = void (*)(Warp& warp, const Instruction& instruction, uint32_t lanes);

enum class Kind : uint8_t {
  kPlain,       // execute, go on
  kConvergent,  // the same, once all lanes that it names are here
  kBranch,
  kBarrier,  // of the CTA
  kExit,
};

struct Instruction {
  Execute execute = nullptr;
  Kind kind = Kind::kPlain;
  bool is_guarded = false;
  bool guard_negated = false;
  bool is_target = false;  // a branch comes here
  int32_t target = 0;      // of a branch
  Ref guard = {};
  std::array<Ref, 4> out = {};
  std::array<Ref, 10> in = {};
  int num_out = 0;
  int num_in = 0;
  int64_t number = 0;    // the offset of the first address, or a wait_group's groups
  int64_t number2 = 0;   // the offset of the second address
  int32_t members = -1;  // the operand that names the lanes of a convergent one; -1: all
  int32_t bytes = 0;     // of a memory access, all elements of a vector together
  int32_t choice = 0;    // what else an instruction needs to know
  Place place = {};
};

// Special registers, in the order of Program::specials.
enum Special {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kNumSpecials
};

// A register that has one value in all lanes, from the start on.
struct Constant {
  Ref ref;
  uint64_t value;
  int bits;
};

struct Program {
  Entry entry;
  std::vector<Instruction> code;
  uint32_t num_words = 0;
  uint32_t num_registers = 0;
  std::vector<Constant> constants;
  std::array<Ref, kNumSpecials> specials = {};
  std::array<bool, kNumSpecials> has_special = {};
  int64_t dynamic_shared_offset = 0;  // of dynamic shared memory
};

// Throws std::runtime_error, naming the line, for an instruction that is not known.
Program MakeProgram(const Module& module, const std::string& entry);

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_PROGRAM_H_
