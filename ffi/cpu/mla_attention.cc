// The handler of jax_paged.mla_attention.v1 on CPU: attention with one KV head whose V is the front
// of each row of K, read from the same pages by the same kernels.

#include <cstdint>
#include <string>

#include "common/mla_checks.h"
#include "common/params.h"
#include "cpu/attend.h"
#include "cpu/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

ffi::Error MlaAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv_pages,
                        ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> seq_lens,
                        ffi::Buffer<ffi::S32> cu_q_lens, ffi::Buffer<ffi::S32> num_seqs,
                        ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> sm_scale,
                        ffi::Buffer<ffi::F32> kv_scale, bool causal, int64_t num_kv_splits,
                        int64_t split_tokens, ffi::Result<ffi::AnyBuffer> out,
                        ffi::ResultBuffer<ffi::F32> lse) {
  AttentionShape shape = {};
  const std::string error =
      ReadMlaAttention(q, kv_pages, Shape(page_table), Shape(seq_lens), Shape(cu_q_lens),
                       Shape(num_seqs), Shape(layer), Shape(sm_scale), Shape(kv_scale),
                       num_kv_splits, split_tokens, *out, Shape(*lse), &shape);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);

  AttentionParams params = {};
  params.q = q.untyped_data();
  params.out = out->untyped_data();
  params.lse = lse->typed_data();
  params.page_table = page_table.typed_data();
  params.pages_per_seq = shape.pages_per_seq;
  params.num_q_heads = params.group_size = static_cast<int32_t>(shape.num_q_heads);
  params.num_kv_heads = 1;
  params.head_dim = static_cast<int32_t>(shape.k_pool.head_dim);
  params.v_head_dim = static_cast<int32_t>(shape.v_pool.head_dim);
  params.sm_scale = *sm_scale.typed_data();
  params.causal = causal;
  params.dtype = params.out_dtype = shape.dtype;
  params.kv_dtype = shape.kv_dtype;
  if (IsGiven(Shape(kv_scale))) params.k_scale = params.v_scale = {kv_scale.typed_data(), false};
  const int32_t layer_index = *layer.typed_data();
  params.k = params.v = MakePageView(kv_pages.untyped_data(), shape.k_pool, layer_index);

  return Attend(
      kMlaAttentionOp, pool, params,
      {cu_q_lens.typed_data(), seq_lens.typed_data(), /*windows=*/{}, *num_seqs.typed_data(),
       shape.max_seqs, shape.num_tokens, num_kv_splits, split_tokens, /*trees=*/{}});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MlaAttentionHandler, MlaAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
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
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::Buffer<ffi::F32>>());  // lse

}  // namespace jax_paged::cpu
