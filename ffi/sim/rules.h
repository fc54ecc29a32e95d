// SPDX-License-Identifier: Apache-2.0

// What the instructions do, by their opcodes.

#ifndef JAX_PAGED_SIM_RULES_H_
#define JAX_PAGED_SIM_RULES_H_

#include <string>
#include <unordered_map>
#include <vector>

#include "sim/program.h"

namespace jax_paged::sim {

struct Rule {
  Execute execute = nullptr;
  Kind kind = Kind::kPlain;
  std::vector<std::string> out;  // the types of its results
  std::vector<std::string> in;   // and of its operands
};

// Behind the opcode of a cvt whose operand is a register of 64 bits although its type is narrower.
inline constexpr char kOfWide[] = " of 64";

using Rules = std::unordered_map<std::string, Rule>;  // by opcode: "add.s32"

void AddArithmetic(Rules* rules);  // arithmetic.cc
// mov of two halves into a word of 32 bits or 64 (is_wide), or of a word into two halves.
Execute MoveHalves(bool is_wide, bool packs);
void AddCollectives(Rules* rules);  // collectives.cc: of all lanes together

// An instruction that reads or writes memory (memory.cc): fills `instruction`, all but its
// registers; false where the opcode is of another kind. `register_bits`: the width of each of the
// `elements` registers that it loads or stores.
bool MakeMemoryAccess(const std::string& opcode, int address_bits, int register_bits, int elements,
                      Instruction* instruction);

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_RULES_H_
