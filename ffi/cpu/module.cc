// SPDX-License-Identifier: Apache-2.0

// The Python module jax_paged._cpu: handlers to register, the instruction set, and the plan of a
// call.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/schedule.h"
#include "cpu/attention/kernels.h"
#include "cpu/handlers.h"
#include "cuda_why_not.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jax_paged::cpu {
namespace {

// What the handler of attention would do with rows of these lengths: the same planning code.
nb::dict AttentionPlan(const std::vector<int64_t>& q_lens, const std::vector<int64_t>& seq_lens,
                       int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                       int32_t v_head_dim, int64_t num_threads, int64_t num_kv_splits,
                       int64_t split_tokens, bool causal,
                       const std::vector<int64_t>& unpinned_window,
                       const std::vector<int64_t>& num_pinned) {
  const size_t num_rows = q_lens.size();
  if (seq_lens.size() != num_rows || unpinned_window.size() != num_rows ||
      num_pinned.size() != num_rows) {
    throw std::invalid_argument("attention_plan: expected one number of each kind per row");
  }
  if (num_kv_heads < 1 || num_q_heads % num_kv_heads != 0) {
    throw std::invalid_argument(
        "attention_plan: num_q_heads expected a multiple of num_kv_heads, got " +
        std::to_string(num_q_heads) + " and " + std::to_string(num_kv_heads));
  }
  ScheduleOptions options;
  options.group_size = num_q_heads / num_kv_heads;
  options.num_kv_heads = num_kv_heads;
  options.head_dim = head_dim;
  options.v_head_dim = v_head_dim;
  options.causal = causal;
  options.num_workers = num_threads;
  options.num_kv_splits = num_kv_splits;
  options.split_tokens = split_tokens;
  std::vector<Row> rows;
  int64_t begin = 0;
  for (size_t i = 0; i < q_lens.size(); ++i) {
    rows.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(q_lens[i]),
                    static_cast<int32_t>(seq_lens[i]), /*tree_size=*/0,
                    static_cast<int32_t>(unpinned_window[i]), static_cast<int32_t>(num_pinned[i]),
                    /*slot_offset=*/0});
    begin += q_lens[i];
  }
  std::vector<RowPlan> plans(rows.size());
  const PlanTotals totals =
      PlanCall(&options, rows.data(), static_cast<int32_t>(rows.size()), plans.data());
  nb::list kernels, splits;
  for (size_t i = 0; i < rows.size(); ++i) {
    const char* names[] = {"empty", "decode", "prefill"};
    kernels.append(names[static_cast<int>(plans[i].kind)]);
    splits.append(plans[i].kv_splits);
  }
  nb::dict plan;
  plan["isa"] = ChosenKernels().isa;
  plan["num_threads"] = options.num_workers;
  plan["work_items"] = totals.items;
  plan["kernels"] = kernels;
  plan["kv_splits"] = splits;
  return plan;
}

nb::dict Registrations() {
  nb::dict handlers;
  handlers["jax_paged.attention.v1"] = nb::capsule(reinterpret_cast<void*>(AttentionHandler));
  handlers["jax_paged.merge_attention_states.v1"] =
      nb::capsule(reinterpret_cast<void*>(MergeStatesHandler));
  handlers["jax_paged.qkv_norm_rope_write.v2"] =
      nb::capsule(reinterpret_cast<void*>(QkvNormRopeWriteHandler));
  handlers["jax_paged.write_kv.v1"] = nb::capsule(reinterpret_cast<void*>(WriteKvHandler));
  handlers["jax_paged.copy_rows.v1"] = nb::capsule(reinterpret_cast<void*>(CopyRowsHandler));
  handlers["jax_paged.scatter_rows.v1"] = nb::capsule(reinterpret_cast<void*>(ScatterRowsHandler));
  handlers["jax_paged.zero_pool.v1"] = nb::capsule(reinterpret_cast<void*>(ZeroPoolHandler));
  handlers["jax_paged.linear.v2"] = nb::capsule(reinterpret_cast<void*>(LinearHandler));
  handlers["jax_paged.linear_int4.v2"] = nb::capsule(reinterpret_cast<void*>(LinearInt4Handler));
  handlers["jax_paged.lora.v1"] = nb::capsule(reinterpret_cast<void*>(LoraHandler));
  handlers["jax_paged.moe_experts.v1"] = nb::capsule(reinterpret_cast<void*>(MoeExpertsHandler));
  handlers["jax_paged.moe_experts_int4.v1"] =
      nb::capsule(reinterpret_cast<void*>(MoeExpertsInt4Handler));
  return handlers;
}

}  // namespace

}  // namespace jax_paged::cpu

NB_MODULE(_cpu, module) {
  namespace cpu = jax_paged::cpu;
  cpu::ChosenKernels();  // a wrong JAX_PAGED_CPU_ISA fails here, at import
  module.attr("ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("cuda_why_not") = JAX_PAGED_CUDA_WHY_NOT;
  module.def("registrations", &cpu::Registrations,
             "The FFI handlers: a dict of target name to capsule.");
  module.def(
      "isa", [] { return cpu::ChosenKernels().isa; },
      "The instruction set in use: generic, avx2, avx512 or avx512bf16.");
  module.def(
      "attention_plan", &cpu::AttentionPlan, nb::kw_only(), nb::arg("q_lens"), nb::arg("seq_lens"),
      nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("v_head_dim"),
      nb::arg("num_threads"), nb::arg("num_kv_splits"), nb::arg("split_tokens"), nb::arg("causal"),
      nb::arg("unpinned_window"), nb::arg("num_pinned"),
      "What attention would do on num_threads threads with rows of these lengths (seq_lens: "
      "stored\n"
      "tokens; unpinned_window: those that a query sees beside pinned ones, 0: all): a dict of\n"
      "isa, num_threads (1 when the work is too small to share), work_items and, per row,\n"
      "kernels (decode, prefill or empty) and kv_splits.");
}
