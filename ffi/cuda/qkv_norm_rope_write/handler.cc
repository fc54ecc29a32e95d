// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.qkv_norm_rope_write.v1 on CUDA: checks, fills QkvArgs, launches.

#include <string>
#include <string_view>
#include <utility>

#include "common/ffi_checks.h"
#include "common/qkv_checks.h"
#include "cuda/qkv_norm_rope_write/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error QkvNormRopeWrite(cudaStream_t stream, const QkvParams& params,
                            const PagesOfCall (&pages)[2]) {
  QkvArgs args;
  if (!MakeQkvArgs(params, &args)) {
    return ffi::Error::InvalidArgument(Mismatch(kQkvOp, "qkv",
                                                "fewer tokens than CUDA's limit of blocks allows",
                                                std::to_string(params.num_tokens)));
  }
  // XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
  for (const auto& [from, to] : pages) {
    if (from.untyped_data() == to.untyped_data()) continue;
    const cudaError_t copied = cudaMemcpyAsync(to.untyped_data(), from.untyped_data(),
                                               from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (copied != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(copied));
  }
  const cudaError_t launched = LaunchQkv(stream, params.dtype, args);
  if (launched != cudaSuccess) {
    return ffi::Error::Internal(std::string(kQkvOp) + ": " + cudaGetErrorString(launched));
  }
  return ffi::Error::Success();
}

constexpr auto kHandle = HandleQkv<QkvNormRopeWrite, cudaStream_t>;

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QkvNormRopeWriteHandler, kHandle,
                              BindQkv(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
