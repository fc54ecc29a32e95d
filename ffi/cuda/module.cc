// SPDX-License-Identifier: Apache-2.0

// Python module jax_paged._cuda: the CUDA handlers and how they were built.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jax_paged::cuda {
extern "C" XLA_FFI_Error* AttentionHandler(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* AttentionPlanHandler(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* MergeStatesHandler(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* MoeExpertsHandler(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* WriteKvHandler(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* QkvNormRopeWriteHandler(XLA_FFI_CallFrame*);
}  // namespace jax_paged::cuda

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict handlers;
    handlers["jax_paged.attention.v1"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::AttentionHandler));
    handlers["jax_paged.attention_plan.v1"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::AttentionPlanHandler));
    handlers["jax_paged.merge_attention_states.v1"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::MergeStatesHandler));
    handlers["jax_paged.moe_experts.v1"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::MoeExpertsHandler));
    handlers["jax_paged.qkv_norm_rope_write.v2"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::QkvNormRopeWriteHandler));
    handlers["jax_paged.write_kv.v1"] =
        nb::capsule(reinterpret_cast<void*>(jax_paged::cuda::WriteKvHandler));
    return handlers;
  });
  m.attr("ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  // 1000 * major + 10 * minor of the newest CUDA that the driver runs; 0 without a driver.
  m.def("driver_version", [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  });
  m.attr("toolkit") = JAX_PAGED_CUDA_TOOLKIT;
  m.attr("architectures") = JAX_PAGED_CUDA_ARCHS;
}
