// SPDX-License-Identifier: Apache-2.0

// What an attention kernel is told about one call. Knows nothing of XLA or of a device.

#ifndef JAX_PAGED_COMMON_PARAMS_H_
#define JAX_PAGED_COMMON_PARAMS_H_

#include <cstdint>

#include "common/attention_call.h"
#include "common/dtypes.h"
#include "common/page_view.h"

namespace jax_paged {

struct AttentionParams {
  const void* q;              // [T, num_q_heads, head_dim], dtype
  void* out;                  // [T, num_q_heads, v_head_dim], out_dtype
  float* lse;                 // [T, num_q_heads], natural log
  PageView k;                 // the layer's pages, kv_dtype
  PageView v;                 // the same, v_head_dim wide
  const int32_t* page_table;  // [S, pages_per_seq]; of runs [S, 1]
  int64_t pages_per_seq;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t group_size;  // query heads per KV head
  int32_t head_dim;
  int32_t v_head_dim;
  float sm_scale;
  LogitOptions<PlainPointer> logits;
  KvScale k_scale;  // of 8-bit pages; per token: those of the layer
  KvScale v_scale;
  const int32_t* trees;  // [S, 3, max_tree] as ReadTree (tree.h) leaves them, null: no trees
  int64_t max_tree;
  float out_scale;  // what an fp8 output is divided by
  RopeTables rope;  // what q and k are turned by
  bool causal;
  bool is_run;     // a row's pages follow each other: page_table has the first alone
  bool has_atoms;  // K and V rows are not contiguous in the pages (Layout::kVllm5d)
  Dtype dtype;
  Dtype kv_dtype;
  Dtype out_dtype;
};

// The page ids of one row.
struct RowPages {
  const int32_t* ids;
  bool is_run;

  int64_t operator[](int64_t i) const { return is_run ? int64_t{ids[0]} + i : ids[i]; }
};

inline RowPages PagesOf(const AttentionParams& params, int32_t row) {
  return {params.page_table + row * (params.is_run ? 1 : params.pages_per_seq), params.is_run};
}

// Whether K and V are converted to floats in scratch, and the kernels of float serve the call.
inline bool IsStaged(const AttentionParams& params) {
  return IsEightBit(params.kv_dtype) || params.rope.cos;
}

// One row of the batch with its lengths made safe: it owns tokens [q_begin, q_begin + q_len) of q.
//
// Stored token `slot` is token `slot` of the sequence where slot < num_pinned, else slot +
// slot_offset. Arithmetic on tokens, below and in the kernels, is on stored ones unless it says
// otherwise.
struct Row {
  int32_t q_begin;
  int32_t q_len;
  int32_t seq_len;      // stored tokens
  int32_t tree_size;    // its last stored tokens are a tree that is no chain; 0: there is none
  int32_t window;       // tokens that a query sees beside the pinned ones, itself included; 0: all
  int32_t num_pinned;   // tokens at the front that no window hides
  int32_t slot_offset;  // not 0: the row slid

  // How many places the window of this row slid over before the token in `slot`.
  int64_t SlidBy(int64_t slot) const { return slot < num_pinned ? 0 : slot_offset; }
};

// The windows of a batch's rows, unchecked.
struct RowWindows {
  const int32_t* sliding_window;  // null: none; [1] or [S]
  bool one_for_all;               // it is [1]
  const int32_t* num_pinned;      // [S] like slot_offset, or both null
  const int32_t* slot_offset;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_PARAMS_H_
