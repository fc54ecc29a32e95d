// SPDX-License-Identifier: Apache-2.0

// What a call of jax_paged.qkv_norm_rope_write is checked for, on CPU, on CUDA and in the emulator.
// Knows nothing of XLA.

#ifndef JAX_PAGED_COMMON_QKV_CHECKS_H_
#define JAX_PAGED_COMMON_QKV_CHECKS_H_

#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/qkv_params.h"

namespace jax_paged {

inline constexpr char kQkvOp[] = "jax_paged.qkv_norm_rope_write";

struct QkvArrays {
  Array qkv, k_pages, v_pages, positions, slot_mapping, cos, sin;
  Array q_norm, k_norm;  // of no elements: none
  Array layer;
  Array q, k_result, v_result;
};

// Checks all and fills `params`, whose pages are those of the results.
inline std::string ReadQkv(const QkvArrays& in, float eps, std::string_view style,
                           std::string_view layout_name, QkvParams* params) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  QkvParams& p = *params;
  const auto type = in.qkv.type;
  Layout layout = Layout::kHnd;
  if (failed(ReadDtype(kQkvOp, "qkv", type, &p.dtype)) ||
      failed(CheckType(kQkvOp, "k_pages", in.k_pages.type, type)) ||
      failed(CheckType(kQkvOp, "v_pages", in.v_pages.type, type)) ||
      failed(CheckType(kQkvOp, "q result", in.q.type, type)) ||
      failed(CheckType(kQkvOp, "k_pages result", in.k_result.type, type)) ||
      failed(CheckType(kQkvOp, "v_pages result", in.v_result.type, type)) ||
      failed(ReadDtype(kQkvOp, "q_norm", in.q_norm.type, &p.norm_dtype)) ||
      failed(CheckType(kQkvOp, "k_norm", in.k_norm.type, in.q_norm.type)) ||
      failed(CheckType(kQkvOp, "positions", in.positions.type, TypeOf<int32_t>())) ||
      failed(CheckType(kQkvOp, "slot_mapping", in.slot_mapping.type, TypeOf<int32_t>())) ||
      failed(CheckType(kQkvOp, "cos", in.cos.type, TypeOf<float>())) ||
      failed(CheckType(kQkvOp, "sin", in.sin.type, TypeOf<float>())) ||
      failed(CheckType(kQkvOp, "layer", in.layer.type, TypeOf<int32_t>()))) {
    return error;
  }
  const int64_t element_bytes = ByteWidth(p.dtype);
  if (failed(ReadLayout(kQkvOp, layout_name.data(), layout_name.size(), &layout)) ||
      failed(layout == Layout::kHnd || layout == Layout::kNhd
                 ? std::string()
                 : Mismatch(kQkvOp, "layout", "\"HND\" or \"NHD\"",
                            "\"" + std::string(layout_name) + "\"")) ||
      failed(ReadPoolShape(kQkvOp, "k_pages", in.k_pages.shape, layout, Pool::kKeys, element_bytes,
                           &p.k_pool)) ||
      failed(ReadPoolShape(kQkvOp, "v_pages", in.v_pages.shape, layout, Pool::kValues,
                           element_bytes, &p.v_pool)) ||
      failed(CheckSamePool(kQkvOp, p.k_pool, p.v_pool, in.v_pages.shape)) ||
      failed(CheckSameShape(kQkvOp, "k_pages result", in.k_result.shape, in.k_pages.shape)) ||
      failed(CheckSameShape(kQkvOp, "v_pages result", in.v_result.shape, in.v_pages.shape)) ||
      failed(CheckRank(kQkvOp, "slot_mapping", in.slot_mapping.shape, 1)) ||
      failed(CheckRank(kQkvOp, "q result", in.q.shape, 3)) ||
      failed(CheckRank(kQkvOp, "cos", in.cos.shape, 2)) ||
      failed(CheckSameShape(kQkvOp, "sin", in.sin.shape, in.cos.shape)) ||
      failed(CheckShape(kQkvOp, "layer", in.layer.shape, {}))) {
    return error;
  }
  p.num_tokens = in.slot_mapping.shape[0];
  const int64_t num_q_heads = p.num_q_heads = in.q.shape[1];
  p.max_positions = in.cos.shape[0];
  p.half = in.cos.shape[1];
  p.eps = eps;
  p.interleaved = style == "interleaved";
  const int64_t head_dim = p.k_pool.head_dim;
  if (!p.interleaved && style != "half") {
    return Mismatch(kQkvOp, "style", "\"half\" or \"interleaved\"",
                    "\"" + std::string(style) + "\"");
  }
  if (num_q_heads < 1) {
    return Mismatch(kQkvOp, "q result", "at least 1 head", std::to_string(num_q_heads));
  }
  for (const int64_t dim : {head_dim, p.v_pool.head_dim}) {
    if (dim % 8 == 0 && dim <= kMaxQkvHeadDim) continue;
    return Mismatch(kQkvOp, "head_dim", "a multiple of 8 up to " + std::to_string(kMaxQkvHeadDim),
                    std::to_string(dim));
  }
  if (p.half < 1 || 2 * p.half > head_dim || (!p.interleaved && p.half % 2 != 0)) {
    return Mismatch(kQkvOp, "cos",
                    std::string("rows of 1 to head_dim / 2") +
                        (p.interleaved ? "" : ", an even number with style half"),
                    ShapeText(in.cos.shape.dims, 2));
  }
  if (failed(CheckShape(kQkvOp, "qkv", in.qkv.shape, {p.num_tokens, p.width()})) ||
      failed(CheckShape(kQkvOp, "positions", in.positions.shape, {p.num_tokens})) ||
      failed(CheckShape(kQkvOp, "q result", in.q.shape, {p.num_tokens, num_q_heads, head_dim}))) {
    return error;
  }
  const bool has_q_norm = in.q_norm.shape.count() > 0, has_k_norm = in.k_norm.shape.count() > 0;
  if ((has_q_norm && failed(CheckShape(kQkvOp, "q_norm", in.q_norm.shape, {head_dim}))) ||
      (has_k_norm && failed(CheckShape(kQkvOp, "k_norm", in.k_norm.shape, {head_dim})))) {
    return error;
  }
  if (p.norm_dtype != Dtype::kFloat32 && p.norm_dtype != p.dtype) {
    return Mismatch(kQkvOp, "q_norm", "float32 or the type of qkv", TypeText(in.q_norm.type));
  }
  p.qkv = in.qkv.data;
  p.positions = static_cast<const int32_t*>(in.positions.data);
  p.slot_mapping = static_cast<const int32_t*>(in.slot_mapping.data);
  p.cos = static_cast<const float*>(in.cos.data);
  p.sin = static_cast<const float*>(in.sin.data);
  p.q_norm = has_q_norm ? in.q_norm.data : nullptr;
  p.k_norm = has_k_norm ? in.k_norm.data : nullptr;
  p.layer = static_cast<const int32_t*>(in.layer.data);
  p.q = in.q.data;
  p.k_pages = in.k_result.data;
  p.v_pages = in.v_result.data;
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_QKV_CHECKS_H_
