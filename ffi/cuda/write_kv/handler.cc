// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.write_kv.v1 on CUDA: checks, fills WriteKvArgs, launches. Operands,
// attributes and results are those of the CPU handler; the third result is the workspace.

#include <cstdint>
#include <string>

#include "common/ffi_checks.h"
#include "cuda/in_place.h"
#include "cuda/write_kv/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error WriteKv(cudaStream_t stream, const WriteKvParams& params, const PagesOfCall (&pages)[2],
                   ffi::ResultBuffer<ffi::S32> workspace) {
  const std::string error = CheckWrittenTokens(kWriteKvOp, params.num_tokens, /*ctas_per_token=*/2,
                                               static_cast<int64_t>(workspace->element_count()));
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  cudaError_t status = CopyUnlessAliased(stream, pages);
  if (status == cudaSuccess) {
    status = LaunchWriteKv(stream, MakeWriteKvArgs(params, workspace->typed_data()));
  }
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kWriteKvOp) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

constexpr auto kHandle = HandleWriteKv<WriteKv, cudaStream_t, ffi::ResultBuffer<ffi::S32>>;

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKvHandler, kHandle,
                              BindWriteKv(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
                                  .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
