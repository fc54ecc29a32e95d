// SPDX-License-Identifier: Apache-2.0

// The FFI handlers of the CPU module.

#ifndef JAX_PAGED_CPU_HANDLERS_H_
#define JAX_PAGED_CPU_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace jax_paged::cpu {

extern "C" XLA_FFI_Error* AttentionHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* MergeStatesHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* WriteKvHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* QkvNormRopeWriteHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* CopyRowsHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* ScatterRowsHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* ZeroPoolHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* LinearHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* LinearInt4Handler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* LoraHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* MoeExpertsHandler(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* MoeExpertsInt4Handler(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_HANDLERS_H_
