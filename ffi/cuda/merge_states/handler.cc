// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.merge_attention_states.v1 on CUDA: checks shapes, launches.

#include <string>

#include "common/ffi_checks.h"
#include "common/merge_checks.h"
#include "cuda/merge_states/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error MergeStates(cudaStream_t stream, ffi::AnyBuffer out_a, ffi::Buffer<ffi::F32> lse_a,
                       ffi::AnyBuffer out_b, ffi::Buffer<ffi::F32> lse_b,
                       ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> lse) {
  Dtype dtype;
  const std::string error = ReadMergeStates({ArrayOf(out_a), ArrayOf(lse_a), ArrayOf(out_b),
                                             ArrayOf(lse_b), ArrayOf(*out), ArrayOf(*lse)},
                                            &dtype);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  const cudaError_t launched =
      LaunchMergeStates(stream, dtype,
                        {out_a.untyped_data(), lse_a.typed_data(), out_b.untyped_data(),
                         lse_b.typed_data(), out->untyped_data(), lse->typed_data(),
                         static_cast<int64_t>(lse_a.element_count()), Shape(out_a)[2]});
  if (launched != cudaSuccess) {
    return ffi::Error::Internal(std::string(kMergeStatesOp) + ": " + cudaGetErrorString(launched));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MergeStatesHandler, MergeStates,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()          // out_a
                                  .Arg<ffi::Buffer<ffi::F32>>()   // lse_a
                                  .Arg<ffi::AnyBuffer>()          // out_b
                                  .Arg<ffi::Buffer<ffi::F32>>()   // lse_b
                                  .Ret<ffi::AnyBuffer>()          // out
                                  .Ret<ffi::Buffer<ffi::F32>>(),  // lse
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
