// What the handlers of jax_paged.mla_attention ask of XLA's buffers, on CPU and CUDA.

#ifndef JAX_PAGED_COMMON_MLA_CHECKS_H_
#define JAX_PAGED_COMMON_MLA_CHECKS_H_

#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/params.h"

namespace jax_paged {

inline constexpr char kMlaAttentionOp[] = "jax_paged.mla_attention";
inline constexpr int64_t kMaxLatentDim = 576;  // of a page's rows: 512 latent + 64 rope

// Checks the operands and results, and reads the call as attention with one KV head: K is the whole
// row of a token, V its first v_head_dim elements, so v_pool tells the size of V only: where its
// rows lie, k_pool does.
inline std::string ReadMlaAttention(const xla::ffi::AnyBuffer& q,
                                    const xla::ffi::AnyBuffer& kv_pages, ShapeView page_table,
                                    ShapeView seq_lens, ShapeView cu_q_lens, ShapeView num_seqs,
                                    ShapeView layer, ShapeView sm_scale, ShapeView kv_scale,
                                    int64_t num_kv_splits, int64_t split_tokens,
                                    const xla::ffi::AnyBuffer& out, ShapeView lse,
                                    AttentionShape* shape) {
  constexpr auto kOp = kMlaAttentionOp;
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  const ShapeView pages = Shape(kv_pages);
  if (failed(ReadDtype(kOp, "q", q.element_type(), &shape->dtype)) ||
      failed(ReadKvDtype(kOp, "kv_pages", kv_pages.element_type(), &shape->kv_dtype)) ||
      failed(CheckType(kOp, "out", out.element_type(), q.element_type())) ||
      failed(CheckRank(kOp, "q", Shape(q), 3)) || failed(CheckRank(kOp, "out", Shape(out), 3)) ||
      failed(CheckRank(kOp, "page_table", page_table, 2))) {
    return error;
  }
  if (pages.rank != 3 && pages.rank != 4) {
    return Mismatch(kOp, "kv_pages", "rank 3 or 4", ShapeText(pages.dims, pages.rank));
  }
  const int64_t* dims = pages.dims + (pages.rank - 3);
  const int64_t width = dims[2], v_head_dim = Shape(out)[2];
  shape->out_dtype = shape->dtype;
  if (failed(CheckKvType(kOp, "kv_pages", kv_pages.element_type(), q.element_type()))) return error;
  if (IsGiven(kv_scale) && !IsEightBit(shape->kv_dtype)) {
    return Mismatch(kOp, "kv_scale", "[0]", "a scale");
  }
  shape->k_pool = {/*num_layers=*/pages.rank == 4 ? pages[0] : 1,
                   /*num_pages=*/dims[0],
                   /*num_kv_heads=*/1,
                   /*page_size=*/dims[1],
                   /*head_dim=*/width,
                   ByteWidth(shape->kv_dtype),
                   Layout::kHnd,
                   Pool::kKeys};
  shape->v_pool = shape->k_pool;
  shape->v_pool.pool = Pool::kValues;
  shape->v_pool.head_dim = v_head_dim;
  if (dims[1] < 1 || width < 8 || width > kMaxLatentDim || width % 8 != 0) {
    return Mismatch(kOp, "kv_pages", "page_size >= 1 and rows of a multiple of 8 up to 576",
                    ShapeText(pages.dims, pages.rank));
  }
  if (v_head_dim < 8 || v_head_dim > width || v_head_dim % 8 != 0) {
    return Mismatch(kOp, "v_head_dim", "a multiple of 8 up to " + std::to_string(width),
                    std::to_string(v_head_dim));
  }
  const int64_t num_tokens = shape->num_tokens = Shape(q)[0];
  const int64_t num_q_heads = shape->num_q_heads = Shape(q)[1];
  const int64_t max_seqs = shape->max_seqs = page_table[0];
  shape->pages_per_seq = page_table[1];
  if (num_q_heads < 1) return Mismatch(kOp, "q", "at least one head", "0");
  if (failed(CheckShape(kOp, "q", Shape(q), {num_tokens, num_q_heads, width})) ||
      failed(CheckShape(kOp, "seq_lens", seq_lens, {max_seqs})) ||
      failed(CheckShape(kOp, "cu_q_lens", cu_q_lens, {max_seqs + 1})) ||
      failed(CheckShape(kOp, "num_seqs", num_seqs, {1})) ||
      failed(CheckShape(kOp, "layer", layer, {})) ||
      failed(CheckShape(kOp, "sm_scale", sm_scale, {})) ||
      failed(CheckOptional(kOp, "kv_scale", kv_scale, {1})) ||
      failed(CheckShape(kOp, "out", Shape(out), {num_tokens, num_q_heads, v_head_dim})) ||
      failed(CheckShape(kOp, "lse", lse, {num_tokens, num_q_heads}))) {
    return error;
  }
  return CheckSplits(kOp, num_kv_splits, split_tokens);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_MLA_CHECKS_H_
