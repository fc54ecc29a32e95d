// XLA FFI handler of jax_paged.attention.v1 on CUDA: checks, fills AttentionArgs, launches.
// Operands and attributes are those of the CPU handler; the third result is the workspace.

#include <string>
#include <string_view>

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
                     ffi::Buffer<ffi::F32> sm_scale, ffi::Buffer<ffi::S32> sliding_window,
                     ffi::Buffer<ffi::S32> num_pinned, ffi::Buffer<ffi::S32> slot_offset,
                     ffi::Buffer<ffi::F32> alibi_slopes, ffi::Buffer<ffi::F32> sinks,
                     ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
                     ffi::Buffer<ffi::S32> tree, ffi::Buffer<ffi::S32> tree_sizes,
                     ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                     ffi::Buffer<ffi::F32> out_scale, std::string_view layout_name, bool causal,
                     int64_t num_kv_splits, int64_t split_tokens, float soft_cap,
                     bool rope_interleaved, ffi::Result<ffi::AnyBuffer> out,
                     ffi::ResultBuffer<ffi::F32> lse, ffi::ResultBuffer<ffi::S32> workspace) {
  AttentionCall call = {};
  const AttentionOptions options = {
      Shape(sliding_window), Shape(num_pinned), Shape(slot_offset), Shape(alibi_slopes),
      Shape(sinks),          Shape(k_scale),    Shape(v_scale),     Shape(tree),
      Shape(tree_sizes),     Shape(cos),        Shape(sin),         Shape(out_scale)};
  std::string error =
      ReadAttention(q, k_pages, v_pages, Shape(page_table), Shape(seq_lens), Shape(cu_q_lens),
                    Shape(num_seqs), Shape(layer), Shape(sm_scale), options, layout_name,
                    num_kv_splits, split_tokens, soft_cap, *out, Shape(*lse), &call);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  call.q = q.untyped_data();
  call.k_pages = k_pages.untyped_data();
  call.v_pages = v_pages.untyped_data();
  call.page_table = page_table.typed_data();
  call.seq_lens = seq_lens.typed_data();
  call.cu_q_lens = cu_q_lens.typed_data();
  call.num_seqs = num_seqs.typed_data();
  call.layer = layer.typed_data();
  call.sm_scale = sm_scale.typed_data();
  if (IsGiven(options.sliding_window)) call.sliding_window = sliding_window.typed_data();
  call.has_row_windows = options.sliding_window[0] > 1;
  if (IsGiven(options.num_pinned)) {
    call.num_pinned = num_pinned.typed_data();
    call.slot_offset = slot_offset.typed_data();
  }
  if (IsGiven(options.cos)) {
    call.cos = cos.typed_data();
    call.sin = sin.typed_data();
    call.max_positions = options.cos[0];
    call.rope_half = options.cos[1];
    call.rope_interleaved = rope_interleaved;
  }
  if (IsGiven(options.alibi_slopes)) call.alibi_slopes = alibi_slopes.typed_data();
  if (IsGiven(options.sinks)) call.sinks = sinks.typed_data();
  if (IsGiven(options.tree)) {
    call.tree = tree.typed_data();
    call.tree_sizes = tree_sizes.typed_data();
    call.max_tree = options.tree[1];
  }
  if (IsGiven(options.k_scale)) call.k_scale = k_scale.typed_data();
  if (IsGiven(options.v_scale)) call.v_scale = v_scale.typed_data();
  if (IsGiven(options.out_scale)) call.out_scale = out_scale.typed_data();
  call.k_scale_per_token = options.k_scale.rank > 1;
  call.v_scale_per_token = options.v_scale.rank > 1;
  call.soft_cap = soft_cap;
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

  DeviceLimits limits;
  cudaError_t status = GetDeviceLimits(&limits);
  if (status == cudaSuccess) status = LaunchAttention(stream, call.dtype, limits, args);
  if (status != cudaSuccess) {
    return ffi::Error::Internal(std::string(kAttentionOp) + ": " + cudaGetErrorString(status));
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
                                  .Arg<ffi::Buffer<ffi::S32>>()  // sliding_window
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_pinned
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slot_offset
                                  .Arg<ffi::Buffer<ffi::F32>>()  // alibi_slopes
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sinks
                                  .Arg<ffi::Buffer<ffi::F32>>()  // k_scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // v_scale
                                  .Arg<ffi::Buffer<ffi::S32>>()  // tree
                                  .Arg<ffi::Buffer<ffi::S32>>()  // tree_sizes
                                  .Arg<ffi::Buffer<ffi::F32>>()  // cos
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sin
                                  .Arg<ffi::Buffer<ffi::F32>>()  // out_scale
                                  .Attr<std::string_view>("layout")
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("num_kv_splits")
                                  .Attr<int64_t>("split_tokens")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("rope_interleaved")
                                  .Ret<ffi::AnyBuffer>()          // out
                                  .Ret<ffi::Buffer<ffi::F32>>()   // lse
                                  .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_paged::cuda
