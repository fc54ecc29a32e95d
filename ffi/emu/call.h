// SPDX-License-Identifier: Apache-2.0

// One call of an op, as tests hand it over: operands, attributes and results by their names, and
// how the kernels are launched. All ops have this C interface, which is for ctypes.

#ifndef JAX_PAGED_EMU_CALL_H_
#define JAX_PAGED_EMU_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "common/checks.h"
#include "common/operand_names.h"

extern "C" {

// tests/support/emulation.py has the same structs, field by field.
struct EmulatedArray {
  const char* name;
  void* data;
  uint8_t* touched;  // null, or for each byte whether a kernel asked for it
  int64_t dims[6];
  int32_t rank;
  int32_t type;  // ArrayType
};

struct EmulatedAttribute {
  const char* name;
  const char* text;  // null: it is a number
  double number;
};

struct EmulatedCall {
  const EmulatedArray* operands;
  const EmulatedAttribute* attributes;
  const EmulatedArray* results;  // the workspace among them
  int32_t num_operands;
  int32_t num_attributes;
  int32_t num_results;
  int32_t num_workers;  // CTAs of a persistent kernel
  int32_t stages;       // of the rings of attention's decode kernel
  int32_t plan_ctas;    // of attention's planner
  int32_t shared_bytes_per_cta;
  int32_t shared_bytes_per_multiprocessor;
  uint32_t seed;
  // What ChooseKernels said of attention: the call sets it.
  int32_t chosen_stages;
  int32_t chosen_ctas;
  int32_t chosen_prefill_rows;
  int32_t chosen_latent_rows;  // 0: another kernel than latent.cuh serves
};

}  // extern "C"

namespace jax_paged::emu {

// What an op reads of a call. It is the Source of an AttentionReader, too.
class Call {
 public:
  explicit Call(EmulatedCall* call);

  // An operand, or a result; with null data where there is none of that name.
  Array Find(std::string_view name);
  Array Result(std::string_view name) const;

  template <typename T>
  T Attribute(std::string_view name, T otherwise) {
    const EmulatedAttribute* const found = FindAttribute(name);
    if (found == nullptr) return otherwise;
    constexpr bool kIsText = std::is_same_v<T, std::string_view>;
    if ((found->text != nullptr) != kIsText) {
      problem_ = "attribute \"" + std::string(name) + "\": of another type";
      return otherwise;
    }
    if constexpr (kIsText) {
      return found->text;
    } else {
      return static_cast<T>(found->number);
    }
  }

  // What was wrong with an attribute, and an operand that nobody asked for; or "".
  const std::string& problem() const { return problem_; }
  std::string Unread() const { return names_.Unread(); }

  // How the kernels are launched, and where to say which were chosen.
  EmulatedCall& launch() { return call_; }

 private:
  const EmulatedAttribute* FindAttribute(std::string_view name) const;

  EmulatedCall& call_;
  OperandNames names_;
  std::string problem_;
};

// Runs an op: `run` reads the call and launches kernels on its arrays. Returns "" or what went
// wrong, in memory that the next call overwrites.
const char* Emulate(EmulatedCall* call, std::string (*run)(Call& call));

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_CALL_H_
