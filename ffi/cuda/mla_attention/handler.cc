// XLA FFI handler of jax_paged.mla_attention.v1 on CUDA: attention with one KV head whose V is the
// front of each row of K. The kernels are those of attention/: they take K and V with strides of
// their own, so both are read from the same pages. With V narrower than K that is simt.cuh.

#include <string>

#include "common/mla_checks.h"
#include "cuda/attention/launch.h"
#include "cuda/attention/make_args.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error MlaAttention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer kv_pages,
                        ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> seq_lens,
                        ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                        ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> sm_scale,
                        ffi::Buffer<ffi::F32> kv_scale, bool causal, int64_t num_kv_splits,
                        int64_t split_tokens, ffi::Result<ffi::AnyBuffer> out,
                        ffi::ResultBuffer<ffi::F32> lse, ffi::ResultBuffer<ffi::S32> workspace) {
  AttentionCall call = {};
  std::string error =
      ReadMlaAttention(q, kv_pages, Shape(page_table), Shape(seq_lens), Shape(cu_q_lens),
                       Shape(num_seqs), Shape(layer), Shape(sm_scale), Shape(kv_scale),
                       num_kv_splits, split_tokens, *out, Shape(*lse), &call);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  call.q = q.untyped_data();
  call.k_pages = call.v_pages = kv_pages.untyped_data();
  call.page_table = page_table.typed_data();
  call.seq_lens = seq_lens.typed_data();
  call.cu_q_lens = cu_q_lens.typed_data();
  call.num_seqs = num_seqs.typed_data();
  call.layer = layer.typed_data();
  call.sm_scale = sm_scale.typed_data();
  if (IsGiven(Shape(kv_scale))) call.k_scale = call.v_scale = kv_scale.typed_data();
  call.out = out->untyped_data();
  call.lse = lse->typed_data();
  call.workspace = workspace->untyped_data();
  call.num_kv_splits = num_kv_splits;
  call.split_tokens = split_tokens;
  call.workspace_words = static_cast<int64_t>(workspace->element_count());
  call.causal = causal;
  AttentionArgs args;
  error = MakeArgs(call, &args);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  args.v_strides = args.k_strides;

  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) status = LaunchAttention(stream, call.dtype, limits, args);
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kMlaAttentionOp) + ": " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

}  // namespace

// kCmdBufferCompatible: as attention/handler.cc.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MlaAttentionHandler, MlaAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // kv_pages
                                  .Arg<ffi::Buffer<ffi::S32>>()  // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()  // seq_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // cu_q_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_seqs
                                  .Arg<ffi::Buffer<ffi::S32>>()  // layer
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sm_scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // kv_scale
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("num_kv_splits")
                                  .Attr<int64_t>("split_tokens")
                                  .Ret<ffi::AnyBuffer>()          // out
                                  .Ret<ffi::Buffer<ffi::F32>>()   // lse
                                  .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
