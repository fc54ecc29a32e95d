// The work of an attention call on CPU, for the handlers that make one out of their operands.

#ifndef JAX_PAGED_CPU_ATTEND_H_
#define JAX_PAGED_CPU_ATTEND_H_

#include <cstdint>

#include "common/params.h"
#include "common/schedule.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

// Runs the call; all shapes are checked. Throws std::bad_alloc.
void Attend(xla::ffi::ThreadPool& pool, const AttentionParams& params, ScheduleOptions options,
            const int32_t* cu_q_lens, const int32_t* seq_lens, int32_t num_seqs, int64_t max_seqs,
            int64_t num_tokens);

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_ATTEND_H_
