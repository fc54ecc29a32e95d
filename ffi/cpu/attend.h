// The work of an attention call on CPU, for the handlers that make one out of their operands.

#ifndef JAX_PAGED_CPU_ATTEND_H_
#define JAX_PAGED_CPU_ATTEND_H_

#include <cstdint>

#include "common/params.h"
#include "common/schedule.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

// The trees of a call as it came; without one, `intervals` is null.
struct Trees {
  const int32_t* intervals;  // [max_seqs, max_tree, 2]
  const int32_t* sizes;      // [max_seqs]
  int64_t max_tree;
};

// Runs the call; all shapes are checked. Throws std::bad_alloc.
void Attend(xla::ffi::ThreadPool& pool, AttentionParams params, ScheduleOptions options,
            const int32_t* cu_q_lens, const int32_t* seq_lens, int32_t num_seqs, int64_t max_seqs,
            int64_t num_tokens, const Trees& trees);

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_ATTEND_H_
