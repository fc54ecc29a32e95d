// SPDX-License-Identifier: Apache-2.0

// C interface of the emulated attention kernels, for ctypes (tests/support/emulation.py).

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "common/attention_call.h"
#include "common/operand_names.h"
#include "cuda/attention/make_args.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/select.h"
#include "emu/attention/kernels.h"
#include "emu/machine.h"

namespace {

using jax_paged::AttentionCall;
using jax_paged::Dtype;
using jax_paged::cuda::AttentionArgs;

std::string last_text;

const char* Keep(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

}  // namespace

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
  const EmulatedArray* results;  // out, lse, workspace
  int32_t num_operands;
  int32_t num_attributes;
  int32_t num_workers;
  int32_t stages;
  int32_t plan_ctas;
  int32_t shared_bytes_per_cta;
  int32_t shared_bytes_per_multiprocessor;
  uint32_t seed;
  // Results: what ChooseKernels said.
  int32_t chosen_stages;
  int32_t chosen_ctas;
  int32_t chosen_prefill_rows;
};

}  // extern "C"

namespace {

jax_paged::Array ArrayOf(const EmulatedArray& x) {
  const auto rank = static_cast<size_t>(x.rank);
  return {x.data, static_cast<jax_paged::ArrayType>(x.type), {x.dims, rank}, /*is_given=*/true};
}

// The Source of an AttentionReader.
class Operands {
 public:
  explicit Operands(const EmulatedCall& call) : call_(call) {
    for (int32_t i = 0; i < call_.num_operands; ++i) names_.Add(call_.operands[i].name);
  }

  jax_paged::Array Find(std::string_view name) {
    const int index = names_.Find(name);
    return index < 0 ? jax_paged::Array{} : ArrayOf(call_.operands[index]);
  }
  template <typename T>
  T Attribute(std::string_view name, T otherwise) {
    for (int32_t i = 0; i < call_.num_attributes; ++i) {
      const EmulatedAttribute& attribute = call_.attributes[i];
      if (attribute.name != name) continue;
      if constexpr (std::is_same_v<T, std::string_view>) {
        return attribute.text;
      } else {
        return static_cast<T>(attribute.number);
      }
    }
    return otherwise;
  }
  std::string problem() const { return ""; }
  std::string Unread() const { return names_.Unread(); }

 private:
  const EmulatedCall& call_;
  jax_paged::OperandNames names_;
};

void AddArray(const EmulatedArray& x, bool is_input) {
  const auto type = static_cast<jax_paged::ArrayType>(x.type);
  int64_t bytes =
      type == jax_paged::ArrayType::kInt32 ? 4 : jax_paged::ByteWidth(static_cast<Dtype>(x.type));
  for (int32_t i = 0; i < x.rank; ++i) bytes *= x.dims[i];
  jax_paged::emu::AddRegion(x.name, x.data, bytes, is_input, x.touched);
}

}  // namespace

extern "C" {

// Runs planner, decode and prefill where launch.cu would. Returns "" or what went wrong.
const char* emulate_attention(EmulatedCall* in) {
  namespace emu = jax_paged::emu;
  namespace cuda = jax_paged::cuda;
  emu::ClearRegions();
  for (int32_t i = 0; i < in->num_operands; ++i) AddArray(in->operands[i], /*is_input=*/true);
  for (int32_t i = 0; i < 3; ++i) AddArray(in->results[i], /*is_input=*/false);
  Operands operands(*in);
  AttentionCall call;
  std::string error = jax_paged::AttentionReader(&operands, &call)
                          .Read(ArrayOf(in->results[0]), ArrayOf(in->results[1]));
  AttentionArgs args;
  if (error.empty()) error = cuda::MakeArgs(call, ArrayOf(in->results[2]), &args);
  if (!error.empty()) return Keep(error);
  args.num_workers = in->num_workers;
  args.stages = in->stages;
  const Dtype dtype = call.dtype;
  const cuda::DeviceLimits limits = {in->num_workers, in->shared_bytes_per_cta,
                                     in->shared_bytes_per_multiprocessor};
  const emu::AttentionKernels kernels =
      dtype == Dtype::kBFloat16 ? emu::BFloat16Kernels(args, limits)
                                : (dtype == Dtype::kFloat16 ? emu::Float16Kernels(args, limits)
                                                            : emu::Float32Kernels(args));
  args.prefill_rows = kernels.choice.prefill_rows;
  in->chosen_stages = kernels.choice.decode.stages;
  in->chosen_ctas = kernels.choice.decode.ctas_per_multiprocessor;
  in->chosen_prefill_rows = kernels.choice.prefill_rows;
  error = emu::Launch({in->plan_ctas, cuda::kPlanThreads, sizeof(cuda::PlanShared), in->seed},
                      [&] { cuda::PlanCta(args); });
  const auto run = [&](const emu::AttentionKernel& kernel, int64_t num_ctas) {
    return emu::Launch(
        {static_cast<int32_t>(num_ctas), cuda::kAttentionThreads, kernel.shared_bytes, in->seed},
        [&] { kernel.run(args); });
  };
  if (error.empty()) error = run(kernels.decode, args.num_workers);
  if (error.empty() && args.prefill_rows > 0) {
    const int64_t units = cuda::MaxPrefillUnits(args);
    error = run(kernels.prefill, units < args.num_workers ? units : args.num_workers);
  }
  return Keep(error);
}

int64_t workspace_words(int64_t max_seqs, int64_t num_kv_heads, int64_t group_size,
                        int64_t v_head_dim, int64_t capacity, int64_t num_kv_splits,
                        int64_t split_tokens, int64_t max_tree) {
  return jax_paged::cuda::WorkspaceWords({max_seqs, num_kv_heads, group_size, v_head_dim, capacity,
                                          num_kv_splits, split_tokens, max_tree});
}

void skip_site(const char* site) { jax_paged::emu::SkipSite(site); }

// The synchronisations that ran since the last call, one a line.
const char* take_sites() {
  std::string lines;
  for (const std::string& site : jax_paged::emu::TakeSites()) lines += site + "\n";
  return Keep(lines);
}

}  // extern "C"
