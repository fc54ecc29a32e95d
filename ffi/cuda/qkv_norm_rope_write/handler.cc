// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.qkv_norm_rope_write.v2 on CUDA: checks, fills QkvArgs,
// launches. Operands, attributes and results are those of the CPU handler; the sixth result is the
// workspace.

#include <cstdint>
#include <string>

#include "common/ffi_checks.h"
#include "common/qkv_checks.h"
#include "cuda/in_place.h"
#include "cuda/qkv_norm_rope_write/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error QkvNormRopeWrite(cudaStream_t stream, const QkvParams& params,
                            const PagesOfCall (&pages)[4], ffi::ResultBuffer<ffi::S32> workspace) {
  const QkvArgs args = MakeQkvArgs(params, workspace->typed_data());
  const std::string error = CheckWrittenTokens(kQkvOp, params.num_tokens, args.ctas_per_token,
                                               static_cast<int64_t>(workspace->element_count()));
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  cudaError_t status = CopyUnlessAliased(stream, pages);
  if (status == cudaSuccess) status = LaunchQkv(stream, params.dtype, args);
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kQkvOp) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

constexpr auto kHandle = HandleQkv<QkvNormRopeWrite, cudaStream_t, ffi::ResultBuffer<ffi::S32>>;

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QkvNormRopeWriteHandler, kHandle,
                              BindQkv(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
                                  .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
