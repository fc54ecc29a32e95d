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

// Layout rpa: k_pages hold V too, and v_pages and their result have no elements.
struct QkvArrays {
  Array qkv, k_pages, v_pages;
  Array k_scale, v_scale;  // [0]: none; [num_kv_heads]: given; of rank 3 or 4: pools, written
  Array positions, slot_mapping, cos, sin;
  Array q_norm, k_norm;  // of no elements: none
  Array layer;
  Array q, k_result, v_result;
  Array k_scale_result, v_scale_result;  // [0] unless the scales are pools
};

// Reads the scale of K or V, beside pages of the shape `pages`.
inline std::string ReadQkvScale(const char* name, const Array& scale, const Array& result,
                                const PoolShape& pages, Dtype kv_dtype, QkvScale* read) {
  const std::string result_name = std::string(name) + " result";
  const int64_t nothing[] = {0};
  const int64_t dims[] = {pages.num_layers, pages.num_pages, pages.num_kv_heads, pages.page_size};
  ShapeView expected = {nothing, 1}, expected_result = {nothing, 1};
  if (IsEightBit(kv_dtype) && scale.shape.rank > 1) {
    const bool is_stacked = scale.shape.rank == 4 || pages.num_layers > 1;
    expected = is_stacked ? ShapeView{dims, 4} : ShapeView{dims + 1, 3};
    expected_result = expected;
    read->computed = static_cast<float*>(result.data);
  } else if (IsEightBit(kv_dtype) && scale.shape.count() > 0) {
    expected = {dims + 2, 1};
    read->given = static_cast<const float*>(scale.data);
  }
  for (std::string error :
       {CheckType(kQkvOp, name, scale.type, TypeOf<float>()),
        CheckType(kQkvOp, result_name.c_str(), result.type, TypeOf<float>()),
        CheckSameShape(kQkvOp, name, scale.shape, expected),
        CheckSameShape(kQkvOp, result_name.c_str(), result.shape, expected_result)}) {
    if (!error.empty()) return error;
  }
  return "";
}

// Checks all and fills `params`, whose pages are those of the results.
inline std::string ReadQkv(QkvArrays in, float eps, std::string_view style,
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
      failed(ReadKvDtype(kQkvOp, "k_pages", in.k_pages.type, type, &p.kv_dtype)) ||
      failed(CheckType(kQkvOp, "v_pages", in.v_pages.type, in.k_pages.type)) ||
      failed(CheckType(kQkvOp, "q result", in.q.type, type)) ||
      failed(CheckType(kQkvOp, "k_pages result", in.k_result.type, in.k_pages.type)) ||
      failed(CheckType(kQkvOp, "v_pages result", in.v_result.type, in.k_pages.type)) ||
      failed(ReadDtype(kQkvOp, "q_norm", in.q_norm.type, &p.norm_dtype)) ||
      failed(CheckType(kQkvOp, "k_norm", in.k_norm.type, in.q_norm.type)) ||
      failed(CheckType(kQkvOp, "positions", in.positions.type, TypeOf<int32_t>())) ||
      failed(CheckType(kQkvOp, "slot_mapping", in.slot_mapping.type, TypeOf<int32_t>())) ||
      failed(CheckType(kQkvOp, "cos", in.cos.type, TypeOf<float>())) ||
      failed(CheckType(kQkvOp, "sin", in.sin.type, TypeOf<float>())) ||
      failed(CheckType(kQkvOp, "layer", in.layer.type, TypeOf<int32_t>())) ||
      failed(ReadLayout(kQkvOp, layout_name.data(), layout_name.size(), &layout))) {
    return error;
  }
  if (layout == Layout::kRpa) {
    if (failed(CheckShape(kQkvOp, "v_pages", in.v_pages.shape, {0})) ||
        failed(CheckShape(kQkvOp, "v_pages result", in.v_result.shape, {0}))) {
      return error;
    }
    in.v_pages = in.k_pages;
    in.v_result = in.k_result;
  }
  const int64_t element_bytes = ByteWidth(p.kv_dtype);
  if (failed(ReadPoolShape(kQkvOp, "k_pages", in.k_pages.shape, layout, Pool::kKeys, element_bytes,
                           &p.k_pool)) ||
      failed(ReadPoolShape(kQkvOp, "v_pages", in.v_pages.shape, layout, Pool::kValues,
                           element_bytes, &p.v_pool)) ||
      failed(CheckSamePool(kQkvOp, p.k_pool, p.v_pool, in.v_pages.shape)) ||
      failed(CheckSameShape(kQkvOp, "k_pages result", in.k_result.shape, in.k_pages.shape)) ||
      failed(CheckSameShape(kQkvOp, "v_pages result", in.v_result.shape, in.v_pages.shape)) ||
      failed(ReadQkvScale("k_scale", in.k_scale, in.k_scale_result, p.k_pool, p.kv_dtype,
                          &p.k_scale)) ||
      failed(ReadQkvScale("v_scale", in.v_scale, in.v_scale_result, p.v_pool, p.kv_dtype,
                          &p.v_scale)) ||
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
  p.v_pages = static_cast<char*>(in.v_result.data) + p.v_pool.first_byte();
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_QKV_CHECKS_H_
