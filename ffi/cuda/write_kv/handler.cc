// XLA FFI handler of jax_paged.write_kv.v1 on CUDA: checks shapes, fills WriteKvParams, launches.
#include <string>
#include <string_view>
#include <utility>

#include "cuda/write_kv/launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jax_paged.write_kv: " + what);
}

// Fills `pool` from the pages [(L,) P, Hkv, page_size, D] (HND) or [(L,) P, page_size, Hkv, D]
// (NHD).
ffi::Error FillPool(const char* name, ffi::AnyBuffer& pages, ffi::AnyBuffer& tokens,
                    ffi::Result<ffi::AnyBuffer>& out, bool hnd, WriteKvPool* pool,
                    WriteKvParams* params) {
  const auto dims = pages.dimensions();
  if (dims.size() != 4 && dims.size() != 5) {
    return Invalid(std::string(name) + " expected rank 4 or 5, got " + std::to_string(dims.size()));
  }
  const size_t first = dims.size() - 4;
  const int64_t heads = dims[first + (hnd ? 1 : 2)];
  const int64_t page_size = dims[first + (hnd ? 2 : 1)];
  const int64_t head_dim = dims[first + 3];
  const auto token_dims = tokens.dimensions();
  if (token_dims.size() != 3 || token_dims[1] != heads || token_dims[2] != head_dim ||
      tokens.element_type() != pages.element_type()) {
    return Invalid(
        std::string("tokens of ") + name +
        " expected [tokens, num_kv_heads, head_dim] with the shape and dtype of the pages");
  }
  const int64_t item_bytes = static_cast<int64_t>(ffi::ByteWidth(pages.element_type()));
  const int64_t row_bytes = head_dim * item_bytes;
  if (item_bytes < 2) return Invalid(std::string(name) + " expected bf16, f16 or f32");
  pool->pages = static_cast<char*>(out->untyped_data());
  pool->tokens = static_cast<const char*>(tokens.untyped_data());
  pool->row_bytes = static_cast<int32_t>(row_bytes);
  pool->head_stride = hnd ? page_size * row_bytes : row_bytes;
  pool->slot_stride = hnd ? row_bytes : heads * row_bytes;
  pool->page_stride = heads * page_size * row_bytes;
  pool->layer_stride = dims[first] * pool->page_stride;
  params->num_layers = first == 0 ? 1 : static_cast<int32_t>(dims[0]);
  params->num_kv_heads = static_cast<int32_t>(heads);
  params->page_size = static_cast<int32_t>(page_size);
  params->num_slots = dims[first] * page_size;
  return ffi::Error::Success();
}

ffi::Error WriteKv(cudaStream_t stream, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                   ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slot_mapping,
                   ffi::Buffer<ffi::S32> layer, std::string_view layout,
                   ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  if (layout != "HND" && layout != "NHD") {
    return Invalid("layout expected HND or NHD, got " + std::string(layout));
  }
  const bool hnd = layout == "HND";
  WriteKvParams params{};
  ffi::Error error = FillPool("k_pages", k_pages, k, k_out, hnd, &params.pools[0], &params);
  if (error.failure()) return error;
  const WriteKvParams k_params = params;
  error = FillPool("v_pages", v_pages, v, v_out, hnd, &params.pools[1], &params);
  if (error.failure()) return error;
  if (params.num_slots != k_params.num_slots || params.page_size != k_params.page_size ||
      params.num_kv_heads != k_params.num_kv_heads || params.num_layers != k_params.num_layers) {
    return Invalid("v_pages expected the shape of k_pages, head_dim aside");
  }
  params.slot_mapping = slot_mapping.typed_data();
  params.layer = layer.typed_data();
  params.num_tokens = static_cast<int32_t>(slot_mapping.element_count());
  if (k.dimensions()[0] != params.num_tokens || v.dimensions()[0] != params.num_tokens) {
    return Invalid("slot_mapping expected one slot for each token of k and v");
  }
  // XLA aliases the pages to the results; it copies beforehand where it cannot.
  const std::pair<ffi::AnyBuffer*, ffi::Result<ffi::AnyBuffer>*> pools[] = {{&k_pages, &k_out},
                                                                            {&v_pages, &v_out}};
  for (auto [in, out] : pools) {
    if (in->untyped_data() == (*out)->untyped_data()) continue;
    const cudaError_t copied = cudaMemcpyAsync((*out)->untyped_data(), in->untyped_data(),
                                               in->size_bytes(), cudaMemcpyDeviceToDevice, stream);
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
