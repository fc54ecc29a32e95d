// SPDX-License-Identifier: Apache-2.0

// What the attention kernels are told about one call, and the layout of their workspace. Knows
// nothing of XLA; plain C++17, so that handler, kernels and emulator share it.

#ifndef JAX_PAGED_CUDA_ATTENTION_ARGS_H_
#define JAX_PAGED_CUDA_ATTENTION_ARGS_H_

#include <cstdint>

#include "common/attention_call.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "cuda/pointers.h"

namespace jax_paged::cuda {

inline constexpr int32_t kTileTokens = 64;   // KV tokens that a CTA takes at once
inline constexpr int32_t kTileRows = 16;     // packed rows of a unit, but for latent.cuh
inline constexpr int32_t kUnitCost = 2;      // what a unit costs beside its pieces, in pieces
inline constexpr int32_t kMaxWorkers = 384;  // CTAs of an attention launch; bounds the workspace
inline constexpr int32_t kMaxHeadsTogether = 8;
inline constexpr int32_t kAttentionThreads = 128;
inline constexpr int32_t kMinStages = 2;  // of the rings of decode.cuh and latent.cuh, but where
                                          // decode.cuh has room for one alone
inline constexpr int32_t kMaxStages = 4;

// Packed rows of a unit of latent.cuh, by the query heads of a token: few where there are few,
// since the others would be computed for nothing.
constexpr int32_t LatentRows(int64_t group_size) {
  return group_size <= 16 ? 16 : (group_size <= 32 ? 32 : 64);
}
inline constexpr int32_t kMaxLatentRows = 64;
inline constexpr int32_t kMaxLatentWorkers = 192;  // CTAs of a launch; bounds the workspace

// n / divisor for 0 <= n < 2^31 by a multiplication.
struct FastDivide {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  JAX_PAGED_HOST_DEVICE int32_t operator()(int32_t n) const {
    const uint32_t x = static_cast<uint32_t>(n);
    return static_cast<int32_t>((static_cast<uint32_t>((uint64_t{x} * multiplier) >> 32) + x) >>
                                shift);
  }
};

inline FastDivide MakeFastDivide(int32_t divisor) {
  const uint64_t d = static_cast<uint64_t>(divisor);
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < d) ++shift;
  const uint64_t multiplier = ((((uint64_t{1} << shift) - d) << 32) / d) + 1;
  return {static_cast<uint32_t>(d), static_cast<uint32_t>(multiplier), shift};
}

// ---- the plan (plan.cuh says what the words mean) ----

struct alignas(16) PlanHeader {
  int64_t num_positions;  // of the call
  int64_t chunk;          // positions per worker
};
// What the host chose for the calls of the plan, for people (jax_paged/ops/plan.py reads it); the
// kernels do not look at it.
struct alignas(16) PlanLaunches {
  int32_t stages;  // as in AttentionArgs, and so are the others; 0: simt.cuh has no ring
  int32_t prefill_rows;
  int32_t unit_rows;
  int32_t num_workers;
};
struct alignas(16) RowLengths {
  int32_t q_begin;
  int32_t q_len;
  int32_t seq_len;
  int32_t num_units;  // KV heads x tiles of packed rows; 0: nothing for the decode kernel to do

  JAX_PAGED_HOST_DEVICE int32_t Tiles(int32_t num_kv_heads) const {
    return num_units / num_kv_heads;
  }
};
struct alignas(16) RowSplits {
  int32_t num_pieces;  // per unit
  int32_t size;        // fixed splits: KV tiles per piece; automatic: positions per unit
  int64_t first_slot;  // fixed splits: where the row's partial results begin

  JAX_PAGED_HOST_DEVICE int32_t PieceTiles(bool has_fixed_splits) const {
    return has_fixed_splits ? size : 1;
  }
  JAX_PAGED_HOST_DEVICE int32_t Positions(bool has_fixed_splits) const {
    return has_fixed_splits ? num_pieces : size;
  }
};

// What the decode kernel finds in the pages.
enum class PageKind : int {
  kRows,     // whole rows of a token, 16-bit
  kVllm5d,   // atoms of them
  kEightBit  // whole rows, 8-bit
};

// What stored values are multiplied with.
struct DeviceKvScale {
  Global<const float> data;  // null: 1; [num_kv_heads], or per token [num_layers, num_pages,
                             // num_kv_heads, page_size]
  bool per_token;
};

// Of a tree's node: the places of its subtree in depth-first order (common/tree.h).
struct alignas(8) TreeInterval {
  int32_t first;
  int32_t end;
};

struct AttentionArgs {
  Global<const char> q;        // [num_tokens, num_q_heads, head_dim]
  Global<const char> k_pages;  // strides below
  Global<const char> v_pages;
  Global<const int32_t> page_table;  // [max_seqs, table_width]
  Global<const int32_t> seq_lens;    // [max_seqs]
  Global<const int32_t> cu_q_lens;   // [max_seqs + 1]
  Global<const int32_t> num_seqs;    // [1]
  Global<const int32_t> layer;       // scalar
  Global<const float> sm_scale;      // scalar
  // Options; null: not given.
  Global<const int32_t> sliding_window;  // [max_seqs], or [1] where window_step is 0: tokens that a
                                         // query sees; <= 0: all
  Global<const int32_t> num_pinned;      // [max_seqs], like the next one (common/params.h, Row)
  Global<const int32_t> slot_offset;
  LogitOptions<Global> logits;
  Global<const TreeInterval> tree;   // [max_seqs, max_tree]
  Global<const int32_t> tree_sizes;  // [max_seqs], where there is a tree
  DeviceKvScale k_scale;             // of 8-bit pages
  DeviceKvScale v_scale;
  Global<const float> cos;  // [max_positions, rope_half], of rope inside attention
  Global<const float> sin;
  Global<const float> out_scale;  // scalar, what an fp8 output is divided by; null: 1
  Global<char> out;   // [num_tokens, num_q_heads, v_head_dim], out_dtype; null: only a plan is made
  Global<float> lse;  // [num_tokens, num_q_heads]

  // The plan: an operand, or the front of the workspace.
  Global<PlanHeader> header;
  Global<PlanLaunches> launches;
  Global<RowLengths> row_lengths;  // [max_seqs + 1]: of the last, q_begin is where padding begins
  Global<RowSplits> row_splits;    // [max_seqs]
  Global<int64_t> first_position;  // [max_seqs + 1]
  Global<int64_t> first_prefill;   // [max_seqs + 1], in the order of prefill_order
  Global<int32_t> prefill_order;   // [max_seqs], rows with prefill units
  Global<int32_t> row_trees;       // [max_seqs]: nodes of a row's tree that is no chain, or 0
  Global<int32_t> depths;          // [max_seqs, max_tree]: ancestors of each node
  // The call's own part of the workspace.
  Global<float> partial_out;  // [num_slots, kTileRows, v_head_dim], scaled by 2^-m
  Global<float> partial_ml;   // [num_slots, kTileRows, 2]: m (log2) and l
  Global<uint32_t> arrivals;  // [num_slots]
  Global<uint32_t> ticket;    // prefill units drawn beyond the first of each CTA

  PageStrides k_strides;
  PageStrides v_strides;
  PageStrides row_strides;  // in rows of a token and a KV head, which are the same of K and V
  int64_t table_width;
  int64_t num_slots;  // of kTileRows packed rows each
  FastDivide by_page_size;
  FastDivide by_group_size;
  int32_t num_layers;
  int32_t num_pages;
  int32_t page_size;
  int32_t capacity;  // tokens that a row of the page table can name
  int32_t num_tokens;
  int32_t max_seqs;
  int32_t max_tree;     // 0: no trees
  int32_t window_step;  // from one row's sliding_window to the next's
  int32_t max_positions;
  int32_t rope_half;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t v_head_dim;
  int32_t out_bytes;       // of an element of out
  int32_t kv_bytes;        // of an element of the pages
  int32_t num_kv_splits;   // 0: automatic
  int32_t split_tokens;    // 0: off
  int32_t max_q_len;       // queries that a row has at most, if nobody errs; 0: not known
  int32_t num_workers;     // CTAs of the attention launch, at most kMaxWorkers
  int32_t heads_together;  // KV heads that neighbouring workers take side by side (plan.cuh)
  int32_t stages;          // of the decode kernel's rings
  int32_t unit_rows;       // packed rows of a unit
  Layout layout;
  Dtype kv_dtype;        // of the pages: that of q, or 8-bit
  Dtype out_dtype;       // of out: that of q, or fp8
  int32_t prefill_rows;  // packed rows of a prefill unit; 0: the decode kernel serves all rows
  bool causal;
  bool rope_interleaved;
  bool is_latent;  // V is the front of K's rows
  bool is_run;     // a row's pages follow each other: page_table has the first alone
  bool has_plan;   // it is an operand

  JAX_PAGED_HOST_DEVICE bool has_fixed_splits() const {
    return num_kv_splits > 0 || split_tokens > 0;
  }
};

// Sizes that plan and workspace depend on.
struct WorkspaceShape {
  int64_t max_seqs;
  int64_t num_kv_heads;
  int64_t group_size;
  int64_t v_head_dim;
  int64_t capacity;
  int64_t num_kv_splits;
  int64_t split_tokens;
  int64_t max_tree;   // 0: no trees
  int64_t unit_rows;  // packed rows of a unit, at most
};

// Partial results of kTileRows packed rows that a call may leave. Automatic splits: two per worker,
// whatever the batch and the context; so many more where units are larger as kMaxLatentWorkers
// leaves. Fixed splits: one per split of each decode row's unit (rows with more queries are not
// cut). Units smaller than unit_rows need no more.
inline int64_t NumSlots(const WorkspaceShape& shape) {
  const int64_t unit_parts = shape.unit_rows / kTileRows;
  int64_t splits =
      2 *
      (kMaxWorkers > kMaxLatentWorkers * unit_parts ? kMaxWorkers : kMaxLatentWorkers * unit_parts);
  if (shape.split_tokens > 0) {
    const int64_t tokens = RoundUp(shape.split_tokens, kTileTokens);
    splits = CeilDiv(shape.capacity, tokens);
  } else if (shape.num_kv_splits > 0) {
    splits = shape.num_kv_splits;
  } else {
    return splits;
  }
  if (splits <= 1) return 0;
  return shape.max_seqs * shape.num_kv_heads * CeilDiv(shape.group_size, shape.unit_rows) *
         unit_parts * splits;
}

// Words of 4 bytes; jax_paged/ops/attention.py and plan.py compute the same. What follows a plan
// begins at 16 bytes.
inline int64_t PlanWords(const WorkspaceShape& shape) {
  const int64_t tree_words = shape.max_tree > 0 ? shape.max_seqs * (shape.max_tree + 1) : 0;
  return RoundUp((shape.max_seqs + 1) * 13 + 8 + tree_words, 4);
}
// Partial results, counters and the ticket.
inline int64_t ScratchWords(const WorkspaceShape& shape) {
  return NumSlots(shape) * (kTileRows * (shape.v_head_dim + 2) + 1) + 1;
}

// Hands out memory, array behind array.
class Carver {
 public:
  explicit Carver(Global<char> memory) : memory_(memory) {}

  template <typename T>
  Global<T> Take(int64_t count) {
    const Global<char> start = memory_;
    memory_ = memory_ + count * int64_t{sizeof(T)};
    return start.As<T>();
  }

 private:
  Global<char> memory_;
};

// Where the plan's arrays lie in PlanWords words at `memory`, which is aligned to 16 bytes.
inline void CarvePlan(Global<char> memory, const WorkspaceShape& shape, AttentionArgs* args) {
  Carver carver(memory);
  args->header = carver.Take<PlanHeader>(1);
  args->launches = carver.Take<PlanLaunches>(1);
  args->row_lengths = carver.Take<RowLengths>(shape.max_seqs + 1);
  args->row_splits = carver.Take<RowSplits>(shape.max_seqs + 1);
  args->first_position = carver.Take<int64_t>(shape.max_seqs + 1);
  args->first_prefill = carver.Take<int64_t>(shape.max_seqs + 1);
  args->prefill_order = carver.Take<int32_t>(shape.max_seqs + 1);
  if (shape.max_tree == 0) return;
  args->row_trees = carver.Take<int32_t>(shape.max_seqs);
  args->depths = carver.Take<int32_t>(shape.max_seqs * shape.max_tree);
}

// The same of ScratchWords words.
inline void CarveScratch(Global<char> memory, const WorkspaceShape& shape, AttentionArgs* args) {
  const int64_t slots = args->num_slots = NumSlots(shape);
  Carver carver(memory);
  args->partial_out = carver.Take<float>(slots * kTileRows * shape.v_head_dim);
  args->partial_ml = carver.Take<float>(slots * kTileRows * 2);
  args->arrivals = carver.Take<uint32_t>(slots);
  args->ticket = carver.Take<uint32_t>(1);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_ARGS_H_
