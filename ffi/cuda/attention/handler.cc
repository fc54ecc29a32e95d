// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers of jax_paged.attention.v1 and jax_paged.attention_plan.v1 on CUDA: they read the
// call, fill AttentionArgs, launch. Operands and attributes of attention are those of the CPU
// handler; the third result is the workspace. Those of a plan are the same, but of what it needs no
// values there are only shapes.

#include <string>

#include "common/attention_call.h"
#include "common/ffi_checks.h"
#include "common/shaped_operands.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/make_args.h"
#include "cuda/current_device.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

// Fills `args` up for the current device and launches.
template <typename Launch>
ffi::Error Run(const AttentionCall& call, AttentionArgs* args, const Launch& launch) {
  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) {
    ShapeLaunches(call.dtype, limits, args);
    status = launch(limits);
  }
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(kAttentionOp) + ": " + cudaGetErrorString(status));
}

ffi::Error Attention(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::Dictionary attributes,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                     ffi::Result<ffi::AnyBuffer> workspace) {
  NamedOperands operands(arguments, attributes);
  AttentionCall call;
  std::string error = AttentionReader(&operands, &call).Read(ArrayOf(*out), ArrayOf(*lse));
  AttentionArgs args;
  if (error.empty()) error = MakeArgs(call, ArrayOf(*workspace), &args);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  return Run(call, &args, [&](const DeviceLimits& limits) {
    return LaunchAttention(stream, call.dtype, limits, args);
  });
}

ffi::Error AttentionPlan(cudaStream_t stream, ffi::RemainingArgs arguments,
                         ffi::Dictionary attributes, ffi::Result<ffi::AnyBuffer> plan) {
  NamedOperands given(arguments, attributes);
  ShapedOperands operands(&given);
  AttentionCall call;
  std::string error =
      AttentionReader(&operands, &call).Read(operands.Find("out"), operands.Find("lse"));
  AttentionArgs args;
  if (error.empty()) error = MakePlanArgs(call, ArrayOf(*plan), &args);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  return Run(call, &args,
             [&](const DeviceLimits& limits) { return LaunchPlan(stream, limits, args); });
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionPlanHandler, AttentionPlan,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Attrs()
                                  .Ret<ffi::AnyBuffer>(),  // plan, i32[words]
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
