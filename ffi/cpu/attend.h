// The work of an attention call on CPU, for the handlers that make one out of their operands.

#ifndef JAX_PAGED_CPU_ATTEND_H_
#define JAX_PAGED_CPU_ATTEND_H_

#include <cstdint>

#include "common/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

// The trees of a call as it came; without one, `intervals` is null.
struct Trees {
  const int32_t* intervals;  // [max_seqs, max_tree, 2]
  const int32_t* sizes;      // [max_seqs]
  int64_t max_tree;
};

// The rows of a call as they came, and how their KV is to be split.
struct RowsOfCall {
  const int32_t* cu_q_lens;  // [max_seqs + 1]
  const int32_t* seq_lens;   // [max_seqs]
  RowWindows windows;
  int32_t num_seqs;
  int64_t max_seqs;
  int64_t num_tokens;
  int64_t num_kv_splits;  // as in ScheduleOptions
  int64_t split_tokens;
  Trees trees;
};

// Runs the call; all shapes are checked. The error of running out of memory names `op`.
xla::ffi::Error Attend(const char* op, xla::ffi::ThreadPool& pool, const AttentionParams& params,
                       const RowsOfCall& call);

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_ATTEND_H_
