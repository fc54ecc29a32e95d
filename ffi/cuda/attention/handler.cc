// XLA FFI handler of jax_paged.attention.v1 on CUDA: checks, fills AttentionArgs, launches.
// Operands and attributes are those of the CPU handler; the third result is the workspace.

#include <string>
#include <string_view>
#include <utility>

#include "common/ffi_checks.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/make_args.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error Attention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
                     ffi::AnyBuffer v_pages, ffi::Buffer<ffi::S32> page_table,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::S32> cu_q_lens,
                     ffi::Buffer<ffi::S32> num_seqs, ffi::Buffer<ffi::S32> layer,
                     ffi::Buffer<ffi::F32> sm_scale, std::string_view layout_name, bool causal,
                     int64_t num_kv_splits, int64_t split_tokens, ffi::Result<ffi::AnyBuffer> out,
                     ffi::ResultBuffer<ffi::F32> lse, ffi::ResultBuffer<ffi::S32> workspace) {
  const char* const op = kAttentionOp;
  std::string error;
  const auto failed = [&error](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Dtype dtype;
  if (failed(ReadDtype(op, "q", q.element_type(), &dtype)) ||
      failed(CheckType(op, "k_pages", k_pages.element_type(), q.element_type())) ||
      failed(CheckType(op, "v_pages", v_pages.element_type(), q.element_type())) ||
      failed(CheckType(op, "out", out->element_type(), q.element_type()))) {
    return ffi::Error::InvalidArgument(error);
  }
  AttentionCall call = {};
  Layout layout;
  if (failed(ReadLayout(op, layout_name.data(), layout_name.size(), &layout)) ||
      failed(
          ReadPoolShape(op, "k_pages", Shape(k_pages), layout, ByteWidth(dtype), &call.k_pool)) ||
      failed(
          ReadPoolShape(op, "v_pages", Shape(v_pages), layout, ByteWidth(dtype), &call.v_pool)) ||
      failed(CheckSamePool(op, call.k_pool, call.v_pool, Shape(v_pages))) ||
      failed(CheckRank(op, "q", Shape(q), 3)) ||
      failed(CheckRank(op, "page_table", Shape(page_table), 2))) {
    return ffi::Error::InvalidArgument(error);
  }
  call.num_tokens = Shape(q)[0];
  call.num_q_heads = Shape(q)[1];
  call.max_seqs = Shape(page_table)[0];
  call.pages_per_seq = Shape(page_table)[1];
  if (failed(CheckShape(op, "q", Shape(q),
                        {call.num_tokens, call.num_q_heads, call.k_pool.head_dim})) ||
      failed(CheckShape(op, "seq_lens", Shape(seq_lens), {call.max_seqs})) ||
      failed(CheckShape(op, "cu_q_lens", Shape(cu_q_lens), {call.max_seqs + 1})) ||
      failed(CheckShape(op, "num_seqs", Shape(num_seqs), {1})) ||
      failed(CheckShape(op, "layer", Shape(layer), {})) ||
      failed(CheckShape(op, "sm_scale", Shape(sm_scale), {})) ||
      failed(CheckShape(op, "out", Shape(*out),
                        {call.num_tokens, call.num_q_heads, call.v_pool.head_dim})) ||
      failed(CheckShape(op, "lse", Shape(*lse), {call.num_tokens, call.num_q_heads}))) {
    return ffi::Error::InvalidArgument(error);
  }
  call.q = q.untyped_data();
  call.k_pages = k_pages.untyped_data();
  call.v_pages = v_pages.untyped_data();
  call.page_table = page_table.typed_data();
  call.seq_lens = seq_lens.typed_data();
  call.cu_q_lens = cu_q_lens.typed_data();
  call.num_seqs = num_seqs.typed_data();
  call.layer = layer.typed_data();
  call.sm_scale = sm_scale.typed_data();
  call.out = out->untyped_data();
  call.lse = lse->typed_data();
  call.workspace = workspace->untyped_data();
  call.num_kv_splits = num_kv_splits;
  call.split_tokens = split_tokens;
  call.workspace_words = static_cast<int64_t>(workspace->element_count());
  call.causal = causal;
  AttentionArgs args;
  if (failed(MakeArgs(call, &args))) return ffi::Error::InvalidArgument(error);

  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) status = LaunchAttention(stream, dtype, limits, args);
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(op) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: no allocation, no synchronisation, no read of device memory by the host;
// the launch depends on shapes, attributes and the device alone.
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionHandler, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // k_pages
                                  .Arg<ffi::AnyBuffer>()         // v_pages
                                  .Arg<ffi::Buffer<ffi::S32>>()  // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()  // seq_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // cu_q_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_seqs
                                  .Arg<ffi::Buffer<ffi::S32>>()  // layer
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sm_scale
                                  .Attr<std::string_view>("layout")
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("num_kv_splits")
                                  .Attr<int64_t>("split_tokens")
                                  .Ret<ffi::AnyBuffer>()          // out
                                  .Ret<ffi::Buffer<ffi::F32>>()   // lse
                                  .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
