// SPDX-License-Identifier: Apache-2.0

// What the handlers of jax_paged.qkv_norm_rope_write ask of XLA's buffers, on CPU and CUDA alike.

#ifndef JAX_PAGED_COMMON_QKV_CHECKS_H_
#define JAX_PAGED_COMMON_QKV_CHECKS_H_

#include <string>
#include <string_view>
#include <utility>

#include "common/ffi_checks.h"
#include "common/qkv_params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {

inline constexpr char kQkvOp[] = "jax_paged.qkv_norm_rope_write";

struct QkvBuffers {
  xla::ffi::AnyBuffer qkv, k_pages, v_pages;
  xla::ffi::Buffer<xla::ffi::S32> positions, slot_mapping;
  xla::ffi::Buffer<xla::ffi::F32> cos, sin;
  xla::ffi::AnyBuffer q_norm, k_norm;  // of no elements: none
  xla::ffi::Buffer<xla::ffi::S32> layer;
  xla::ffi::AnyBuffer q, k_result, v_result;
};

// Checks all and fills `params`, whose pages are those of the results.
inline std::string ReadQkv(const QkvBuffers& in, float eps, std::string_view style,
                           std::string_view layout_name, QkvParams* params) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  QkvParams& p = *params;
  const auto type = TypeOf(in.qkv);
  Layout layout = Layout::kHnd;
  if (failed(ReadDtype(kQkvOp, "qkv", type, &p.dtype)) ||
      failed(CheckType(kQkvOp, "k_pages", TypeOf(in.k_pages), type)) ||
      failed(CheckType(kQkvOp, "v_pages", TypeOf(in.v_pages), type)) ||
      failed(CheckType(kQkvOp, "q result", TypeOf(in.q), type)) ||
      failed(CheckType(kQkvOp, "k_pages result", TypeOf(in.k_result), type)) ||
      failed(CheckType(kQkvOp, "v_pages result", TypeOf(in.v_result), type)) ||
      failed(ReadDtype(kQkvOp, "q_norm", TypeOf(in.q_norm), &p.norm_dtype)) ||
      failed(CheckType(kQkvOp, "k_norm", TypeOf(in.k_norm), TypeOf(in.q_norm)))) {
    return error;
  }
  const int64_t element_bytes = ByteWidth(p.dtype);
  if (failed(ReadLayout(kQkvOp, layout_name.data(), layout_name.size(), &layout)) ||
      failed(layout == Layout::kVllm5d
                 ? Mismatch(kQkvOp, "layout", "\"HND\" or \"NHD\"", "\"vllm5d\"")
                 : std::string()) ||
      failed(ReadPoolShape(kQkvOp, "k_pages", Shape(in.k_pages), layout, Pool::kKeys, element_bytes,
                           &p.k_pool)) ||
      failed(ReadPoolShape(kQkvOp, "v_pages", Shape(in.v_pages), layout, Pool::kValues,
                           element_bytes, &p.v_pool)) ||
      failed(CheckSamePool(kQkvOp, p.k_pool, p.v_pool, Shape(in.v_pages))) ||
      failed(CheckSameShape(kQkvOp, "k_pages result", Shape(in.k_result), Shape(in.k_pages))) ||
      failed(CheckSameShape(kQkvOp, "v_pages result", Shape(in.v_result), Shape(in.v_pages))) ||
      failed(CheckRank(kQkvOp, "slot_mapping", Shape(in.slot_mapping), 1)) ||
      failed(CheckRank(kQkvOp, "q result", Shape(in.q), 3)) ||
      failed(CheckRank(kQkvOp, "cos", Shape(in.cos), 2)) ||
      failed(CheckSameShape(kQkvOp, "sin", Shape(in.sin), Shape(in.cos))) ||
      failed(CheckShape(kQkvOp, "layer", Shape(in.layer), {}))) {
    return error;
  }
  p.num_tokens = Shape(in.slot_mapping)[0];
  const int64_t num_q_heads = p.num_q_heads = Shape(in.q)[1];
  p.max_positions = Shape(in.cos)[0];
  p.half = Shape(in.cos)[1];
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
                    ShapeText(Shape(in.cos).dims, 2));
  }
  if (failed(CheckShape(kQkvOp, "qkv", Shape(in.qkv), {p.num_tokens, p.width()})) ||
      failed(CheckShape(kQkvOp, "positions", Shape(in.positions), {p.num_tokens})) ||
      failed(CheckShape(kQkvOp, "q result", Shape(in.q), {p.num_tokens, num_q_heads, head_dim}))) {
    return error;
  }
  const bool has_q_norm = in.q_norm.element_count() > 0, has_k_norm = in.k_norm.element_count() > 0;
  if ((has_q_norm && failed(CheckShape(kQkvOp, "q_norm", Shape(in.q_norm), {head_dim}))) ||
      (has_k_norm && failed(CheckShape(kQkvOp, "k_norm", Shape(in.k_norm), {head_dim})))) {
    return error;
  }
  if (p.norm_dtype != Dtype::kFloat32 && p.norm_dtype != p.dtype) {
    return Mismatch(kQkvOp, "q_norm", "float32 or the type of qkv", TypeText(TypeOf(in.q_norm)));
  }
  p.qkv = in.qkv.untyped_data();
  p.positions = in.positions.typed_data();
  p.slot_mapping = in.slot_mapping.typed_data();
  p.cos = in.cos.typed_data();
  p.sin = in.sin.typed_data();
  p.q_norm = has_q_norm ? in.q_norm.untyped_data() : nullptr;
  p.k_norm = has_k_norm ? in.k_norm.untyped_data() : nullptr;
  p.layer = in.layer.typed_data();
  p.q = in.q.untyped_data();
  p.k_pages = in.k_result.untyped_data();
  p.v_pages = in.v_result.untyped_data();
  return "";
}

// The operands, attributes and results of a call, behind the contexts that a platform asks for.
template <typename Binding>
auto BindQkv(Binding&& binding) {
  namespace ffi = xla::ffi;
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()         // qkv
      .template Arg<ffi::AnyBuffer>()         // k_pages
      .template Arg<ffi::AnyBuffer>()         // v_pages
      .template Arg<ffi::Buffer<ffi::S32>>()  // positions
      .template Arg<ffi::Buffer<ffi::S32>>()  // slot_mapping
      .template Arg<ffi::Buffer<ffi::F32>>()  // cos
      .template Arg<ffi::Buffer<ffi::F32>>()  // sin
      .template Arg<ffi::AnyBuffer>()         // q_norm
      .template Arg<ffi::AnyBuffer>()         // k_norm
      .template Arg<ffi::Buffer<ffi::S32>>()  // layer
      .template Attr<float>("eps")
      .template Attr<std::string_view>("style")
      .template Attr<std::string_view>("layout")
      .template Ret<ffi::AnyBuffer>()   // q
      .template Ret<ffi::AnyBuffer>()   // k_pages
      .template Ret<ffi::AnyBuffer>();  // v_pages
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_QKV_CHECKS_H_
