// SPDX-License-Identifier: Apache-2.0

// XLA FFI handler of jax_paged.write_kv.v1 on CUDA: checks shapes, fills WriteKvParams, launches.
#include <string>
#include <string_view>
#include <utility>

#include "common/ffi_checks.h"
#include "common/page_view.h"
#include "cuda/write_kv/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

WriteKvPool MakePool(const PoolShape& shape, void* pages, const void* tokens) {
  return {static_cast<char*>(pages), static_cast<const char*>(tokens), MakePoolSlots(shape),
          static_cast<int32_t>(shape.token_bytes())};
}

ffi::Error WriteKv(cudaStream_t stream, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                   ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slot_mapping,
                   ffi::Buffer<ffi::S32> layer, std::string_view layout_name,
                   ffi::Result<ffi::AnyBuffer> k_result, ffi::Result<ffi::AnyBuffer> v_result) {
  PoolShape k_pool, v_pool;
  const std::string error = ReadWriteKv(k_pages, v_pages, k, v, Shape(slot_mapping), Shape(layer),
                                        layout_name, *k_result, *v_result, &k_pool, &v_pool);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  WriteKvParams params;
  params.pools[0] = MakePool(k_pool, k_result->untyped_data(), k.untyped_data());
  params.pools[1] = MakePool(v_pool, v_result->untyped_data(), v.untyped_data());
  params.slot_mapping = slot_mapping.typed_data();
  params.layer = layer.typed_data();
  params.num_tokens = static_cast<int32_t>(slot_mapping.element_count());
  params.num_kv_heads = static_cast<int32_t>(k_pool.num_kv_heads);
  params.layout = k_pool.layout;
  // XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
  for (const auto& [from, to] : {std::pair(k_pages, *k_result), std::pair(v_pages, *v_result)}) {
    if (from.untyped_data() == to.untyped_data()) continue;
    const cudaError_t copied = cudaMemcpyAsync(to.untyped_data(), from.untyped_data(),
                                               from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (copied != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(copied));
  }
  const cudaError_t launched = LaunchWriteKv(stream, params);
  if (launched != cudaSuccess) {
    return ffi::Error::Internal(std::string("jax_paged.write_kv: ") + cudaGetErrorString(launched));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKvHandler, WriteKv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // k_pages
                                  .Arg<ffi::AnyBuffer>()         // v_pages
                                  .Arg<ffi::AnyBuffer>()         // k
                                  .Arg<ffi::AnyBuffer>()         // v
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slot_mapping
                                  .Arg<ffi::Buffer<ffi::S32>>()  // layer
                                  .Attr<std::string_view>("layout")
                                  .Ret<ffi::AnyBuffer>()   // k_pages
                                  .Ret<ffi::AnyBuffer>(),  // v_pages
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
