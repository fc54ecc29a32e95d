// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.moe_experts.v1 on CUDA: checks, reads the device, launches.

#include <string>
#include <string_view>

#include "common/ffi_checks.h"
#include "common/moe_checks.h"
#include "cuda/current_device.h"
#include "cuda/moe_experts/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error MoeExperts(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer gate_up,
                      ffi::AnyBuffer down, ffi::Buffer<ffi::S32> experts,
                      ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> gate_up_scale,
                      ffi::Buffer<ffi::F32> down_scale, ffi::AnyBuffer gate_up_bias,
                      ffi::AnyBuffer down_bias, ffi::Buffer<ffi::F32> limit,
                      ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::S32> workspace,
                      std::string_view activation) {
  MoeParams params = {};
  std::string error =
      ReadMoe({ArrayOf(x), ArrayOf(gate_up), ArrayOf(down), ArrayOf(experts), ArrayOf(weights),
               ArrayOf(gate_up_scale), ArrayOf(down_scale), ArrayOf(gate_up_bias),
               ArrayOf(down_bias), ArrayOf(limit), ArrayOf(*out)},
              activation, &params);
  if (error.empty()) {
    error = CheckMoeArgs(params, static_cast<int64_t>(workspace->element_count()));
  }
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) status = LaunchMoe(stream, limits, params, workspace->typed_data());
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kMoeOp) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeExpertsHandler, MoeExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::AnyBuffer>()         // gate_up
                                  .Arg<ffi::AnyBuffer>()         // down
                                  .Arg<ffi::Buffer<ffi::S32>>()  // experts
                                  .Arg<ffi::Buffer<ffi::F32>>()  // weights
                                  .Arg<ffi::Buffer<ffi::F32>>()  // gate_up_scale, [0] = none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // down_scale, [0] = none
                                  .Arg<ffi::AnyBuffer>()         // gate_up_bias, [0] = none
                                  .Arg<ffi::AnyBuffer>()         // down_bias, [0] = none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // limit, [0] = none
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Ret<ffi::Buffer<ffi::S32>>()  // workspace
                                  .Attr<std::string_view>("activation"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
