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

ffi::Error QkvNormRopeWrite(cudaStream_t stream, ffi::AnyBuffer qkv, ffi::AnyBuffer k_pages,
                            ffi::AnyBuffer v_pages, ffi::Buffer<ffi::S32> positions,
                            ffi::Buffer<ffi::S32> slot_mapping, ffi::Buffer<ffi::F32> cos,
                            ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm,
                            ffi::Buffer<ffi::S32> layer, float eps, std::string_view style,
                            std::string_view layout, ffi::Result<ffi::AnyBuffer> q,
                            ffi::Result<ffi::AnyBuffer> k_result,
                            ffi::Result<ffi::AnyBuffer> v_result) {
  QkvParams params = {};
  const std::string error =
      ReadQkv({ArrayOf(qkv), ArrayOf(k_pages), ArrayOf(v_pages), ArrayOf(positions),
               ArrayOf(slot_mapping), ArrayOf(cos), ArrayOf(sin), ArrayOf(q_norm), ArrayOf(k_norm),
               ArrayOf(layer), ArrayOf(*q), ArrayOf(*k_result), ArrayOf(*v_result)},
              eps, style, layout, &params);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  QkvArgs args;
  if (!MakeQkvArgs(params, &args)) {
    return ffi::Error::InvalidArgument(Mismatch(kQkvOp, "qkv",
                                                "fewer tokens than CUDA's limit of blocks allows",
                                                ShapeText(Shape(qkv).dims, Shape(qkv).rank)));
  }
  // XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
  for (const auto& [from, to] : {std::pair(k_pages, *k_result), std::pair(v_pages, *v_result)}) {
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

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QkvNormRopeWriteHandler, QkvNormRopeWrite,
                              BindQkv(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
