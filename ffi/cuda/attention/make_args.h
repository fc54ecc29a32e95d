// SPDX-License-Identifier: Apache-2.0

// From a call to AttentionArgs, with the limits of the CUDA kernels; what holds on every platform,
// AttentionReader (common/attention_call.h) has checked. All pointers are device addresses.

#ifndef JAX_PAGED_CUDA_ATTENTION_MAKE_ARGS_H_
#define JAX_PAGED_CUDA_ATTENTION_MAKE_ARGS_H_

#include <cstdint>
#include <string>

#include "common/attention_call.h"
#include "common/checks.h"
#include "cuda/attention/args.h"

namespace jax_paged::cuda {

// Whether latent.cuh may serve a call; jax_paged/ops/attention.py asks the same.
inline bool TakesLatentRows(const AttentionCall& call) {
  return call.is_latent && ByteWidth(call.dtype) == 2;
}
inline constexpr int64_t kMaxPlannedCapacity = int64_t{1} << 30;

inline WorkspaceShape WorkspaceShapeOf(const AttentionCall& call) {
  const int64_t group_size = call.num_q_heads / call.k_pool.num_kv_heads;
  return {call.max_seqs,
          call.k_pool.num_kv_heads,
          group_size,
          call.v_pool.head_dim,
          call.pages_per_seq * call.k_pool.page_size,
          call.num_kv_splits,
          call.split_tokens,
          call.max_tree,
          TakesLatentRows(call) ? LatentRows(group_size) : kTileRows};
}

// Memory of at least so many words. Returns "" or one line: argument, expected, got.
inline std::string CheckWords(const char* argument, const Array& memory, int64_t least) {
  const int64_t words = memory.shape.rank == 1 ? memory.shape[0] : 0;
  if (words >= least) return "";
  return Mismatch(kAttentionOp, argument, "at least " + std::to_string(least) + " words",
                  std::to_string(words));
}

inline Global<char> MemoryOf(const Array& array) {
  return Global<char>(static_cast<char*>(array.data));
}

// All but plan and workspace. Leaves num_workers, stages and prefill_rows to the launch.
inline std::string MakeShape(const AttentionCall& call, AttentionArgs* args) {
  const auto wrong = [](const char* argument, const char* expected, int64_t got) {
    return Mismatch(kAttentionOp, argument, expected, std::to_string(got));
  };
  if (call.num_tokens > INT32_MAX / call.num_q_heads) {
    return wrong("q", "tokens x num_q_heads below 2^31", call.num_tokens);
  }
  if (call.k_pool.num_pages > INT32_MAX || call.k_pool.page_size > INT32_MAX ||
      call.k_pool.num_layers > INT32_MAX || call.max_seqs > INT32_MAX / 2) {
    return wrong("k_pages, page_table", "num_pages, page_size, num_layers, rows in i32",
                 call.k_pool.num_pages);
  }
  if (call.max_tree > INT32_MAX / (call.max_seqs + 1)) {
    return wrong("tree", "rows x max_tree below 2^31", call.max_tree);
  }
  if (call.rope.max_positions > INT32_MAX) {
    return wrong("cos", "positions in i32", call.rope.max_positions);
  }
  constexpr int64_t kMaxTokenStride = int64_t{1} << 26;  // 16 tokens stay within 32 bits
  if (MakePageStrides(call.k_pool).token > kMaxTokenStride) {
    return wrong("k_pages", "at most 2^26 bytes between tokens",
                 MakePageStrides(call.k_pool).token);
  }
  for (const PoolShape* pool : {&call.k_pool, &call.v_pool}) {
    if (pool->layout == Layout::kVllm5d && pool->page_size > INT32_MAX / pool->token_bytes()) {
      return wrong(pool == &call.k_pool ? "k_pages" : "v_pages",
                   "pages below 2^31 bytes per head for layout vllm5d", pool->page_size);
    }
  }
  const WorkspaceShape workspace = WorkspaceShapeOf(call);
  const auto clamp = [](int64_t x) {
    return static_cast<int32_t>(x > INT32_MAX - kTileTokens ? INT32_MAX - kTileTokens : x);
  };
  args->q = Global<const char>(static_cast<const char*>(call.q));
  args->k_pages = Global<const char>(static_cast<const char*>(call.k_pages));
  args->v_pages = Global<const char>(static_cast<const char*>(call.v_pages));
  args->page_table = Global<const int32_t>(call.page_table);
  args->seq_lens = Global<const int32_t>(call.seq_lens);
  args->cu_q_lens = Global<const int32_t>(call.cu_q_lens);
  args->num_seqs = Global<const int32_t>(call.num_seqs);
  args->layer = Global<const int32_t>(call.layer);
  args->sm_scale = Global<const float>(call.sm_scale);
  args->sliding_window = Global<const int32_t>(call.sliding_window);
  args->num_pinned = Global<const int32_t>(call.num_pinned);
  args->slot_offset = Global<const int32_t>(call.slot_offset);
  args->window_step = call.has_row_windows ? 1 : 0;
  args->cos = Global<const float>(call.rope.cos);
  args->sin = Global<const float>(call.rope.sin);
  args->max_positions = static_cast<int32_t>(call.rope.max_positions);
  args->rope_half = static_cast<int32_t>(call.rope.half);
  args->rope_interleaved = call.rope.interleaved;
  args->logits = call.logits.As<Global>();
  args->tree = Global<const TreeInterval>(reinterpret_cast<const TreeInterval*>(call.tree));
  args->tree_sizes = Global<const int32_t>(call.tree_sizes);
  args->max_tree = static_cast<int32_t>(call.max_tree);
  args->k_scale = {Global<const float>(call.k_scale.data), call.k_scale.per_token};
  args->v_scale = {Global<const float>(call.v_scale.data), call.v_scale.per_token};
  args->out_scale = Global<const float>(call.out_scale);
  args->out = Global<char>(static_cast<char*>(call.out));
  args->lse = Global<float>(call.lse);
  args->k_strides = MakePageStrides(call.k_pool);
  args->v_strides = call.is_latent ? args->k_strides : MakePageStrides(call.v_pool);
  PoolShape rows = call.k_pool;
  rows.head_dim = rows.element_bytes = 1;
  args->row_strides = MakePageStrides(rows);
  args->table_width = call.is_run ? 1 : call.pages_per_seq;
  args->is_run = call.is_run;
  args->by_page_size = MakeFastDivide(static_cast<int32_t>(call.k_pool.page_size));
  args->by_group_size = MakeFastDivide(static_cast<int32_t>(workspace.group_size));
  args->num_layers = static_cast<int32_t>(call.k_pool.num_layers);
  args->num_pages = static_cast<int32_t>(call.k_pool.num_pages);
  args->page_size = static_cast<int32_t>(call.k_pool.page_size);
  args->capacity = clamp(workspace.capacity);
  args->num_tokens = static_cast<int32_t>(call.num_tokens);
  args->max_seqs = static_cast<int32_t>(call.max_seqs);
  args->num_q_heads = static_cast<int32_t>(call.num_q_heads);
  args->num_kv_heads = static_cast<int32_t>(call.k_pool.num_kv_heads);
  args->group_size = static_cast<int32_t>(workspace.group_size);
  args->head_dim = static_cast<int32_t>(call.k_pool.head_dim);
  args->v_head_dim = static_cast<int32_t>(call.v_pool.head_dim);
  args->out_bytes = static_cast<int32_t>(ByteWidth(call.out_dtype));
  args->kv_bytes = static_cast<int32_t>(call.k_pool.element_bytes);
  args->num_kv_splits = clamp(call.num_kv_splits);
  args->split_tokens = clamp(call.split_tokens);
  args->max_q_len = clamp(call.max_q_len);
  args->num_workers = 0;
  args->heads_together = 1;
  args->stages = 0;
  args->unit_rows = kTileRows;
  args->layout = call.k_pool.layout;
  args->kv_dtype = call.kv_dtype;
  args->out_dtype = call.out_dtype;
  args->prefill_rows = 0;
  args->causal = call.causal;
  args->is_latent = call.is_latent;
  args->has_plan = call.plan.is_given;
  args->num_slots = 0;
  return "";
}

// Of a call: its plan is an operand, or lies in the workspace in front of what is the call's own.
inline std::string MakeArgs(const AttentionCall& call, const Array& workspace,
                            AttentionArgs* args) {
  std::string error = MakeShape(call, args);
  const WorkspaceShape shape = WorkspaceShapeOf(call);
  const int64_t plan_words = PlanWords(shape);
  const int64_t before = call.plan.is_given ? 0 : plan_words;
  if (error.empty() && call.plan.is_given) error = CheckWords("plan", call.plan, plan_words);
  if (error.empty()) error = CheckWords("workspace", workspace, before + ScratchWords(shape));
  if (!error.empty()) return error;
  const Global<char> memory = MemoryOf(workspace);
  CarvePlan(call.plan.is_given ? MemoryOf(call.plan) : memory, shape, args);
  CarveScratch(memory + before * 4, shape, args);
  return "";
}

// Of a call that makes a plan for others, whose shapes it has: `call` has no outputs.
inline std::string MakePlanArgs(const AttentionCall& call, const Array& plan, AttentionArgs* args) {
  std::string error = MakeShape(call, args);
  const WorkspaceShape shape = WorkspaceShapeOf(call);
  if (error.empty()) error = CheckWords("plan", plan, PlanWords(shape));
  // Tiles of windows that are others than the plan's stay within 32 bits (segment.cuh).
  if (error.empty() && shape.capacity > kMaxPlannedCapacity) {
    error = Mismatch(kAttentionOp, "page_table",
                     "at most " + std::to_string(kMaxPlannedCapacity) + " tokens a row",
                     std::to_string(shape.capacity));
  }
  if (!error.empty()) return error;
  args->out = Global<char>(static_cast<char*>(nullptr));
  CarvePlan(MemoryOf(plan), shape, args);
  return "";
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_MAKE_ARGS_H_
