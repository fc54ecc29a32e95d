// SPDX-License-Identifier: Apache-2.0

// PTX as text, taken apart: the entries of a module, their registers, memory and instructions. What
// an instruction does is not known here (instructions.cc).

#ifndef JAX_PAGED_SIM_PTX_H_
#define JAX_PAGED_SIM_PTX_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace jax_paged::sim {

// Where an instruction comes from: the kernel source where the compiler says so, and the PTX.
struct Place {
  const char* file;  // of the source, or "ptx"; lives as long as the module
  int line;
  int ptx_line;
};

// An instruction as it is written: "@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+8];".
struct Statement {
  std::string_view guard;                  // "%p1", or empty
  bool guard_negated = false;              // @!
  std::vector<std::string_view> opcode;    // {"ld", "global", "v2", "b32"}
  std::vector<std::string_view> operands;  // {"{%r1, %r2}", "[%rd1+8]"}
  Place place;
};

struct Variable {
  int64_t offset;  // within its space
  int64_t bytes;
};

// A kernel. The views are of the module's text, which outlives it.
struct Entry {
  std::string name;
  std::vector<Statement> statements;
  std::map<std::string_view, int64_t> labels;   // to the index of a statement
  std::map<std::string_view, int> registers;    // "%r" to the width in bits; 1: predicate
  std::map<std::string_view, Variable> params;  // kernel arguments, in order of their offsets
  std::vector<Variable> param_list;
  std::map<std::string_view, Variable> shared;  // static shared memory
  int64_t static_shared_bytes = 0;
  std::string_view dynamic_shared;  // the extern array, or empty
  int64_t dynamic_shared_align = 16;
  int max_threads = 0;  // .maxntid; 0: not said
};

// The PTX of one source file for one architecture.
class Module {
 public:
  explicit Module(std::string_view text);  // kept, not copied

  // Takes an entry out of the text. Throws std::runtime_error with a line number where the text is
  // not what this reads.
  Entry Parse(std::string_view name) const;
  const std::vector<std::string>& entries() const { return entries_; }

 private:
  std::string_view text_;
  std::map<int, const char*> files_;
  std::vector<std::string> entries_;
};

// Bits of a type: "b32" 32, "f16x2" 32, "pred" 1. Throws where it is none.
int TypeBits(std::string_view type);

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_PTX_H_
