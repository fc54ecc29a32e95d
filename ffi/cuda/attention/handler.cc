// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.attention.v1 on CUDA: reads the call, fills AttentionArgs, launches.
// Operands and attributes are those of the CPU handler; the third result is the workspace.

#include <string>

#include "common/attention_call.h"
#include "common/ffi_checks.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/make_args.h"
#include "cuda/current_device.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error Attention(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::Dictionary attributes,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                     ffi::Result<ffi::AnyBuffer> workspace) {
  NamedOperands operands(arguments, attributes);
  AttentionCall call;
  std::string error = AttentionReader(&operands, &call).Read(ArrayOf(*out), ArrayOf(*lse));
  AttentionArgs args;
  if (error.empty()) error = MakeArgs(call, ArrayOf(*workspace), &args);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);

  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) status = LaunchAttention(stream, call.dtype, limits, args);
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kAttentionOp) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host;
// the launch depends on shapes, attributes and the device alone.
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionHandler, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Attrs()
                                  .Ret<ffi::AnyBuffer>()   // out
                                  .Ret<ffi::AnyBuffer>()   // lse
                                  .Ret<ffi::AnyBuffer>(),  // workspace, i32[words]
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
