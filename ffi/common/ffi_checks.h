// SPDX-License-Identifier: Apache-2.0

// What the handlers ask of XLA's buffers. The one file here that knows XLA; kernels do not include
// it.

#ifndef JAX_PAGED_COMMON_FFI_CHECKS_H_
#define JAX_PAGED_COMMON_FFI_CHECKS_H_

#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/operand_names.h"
#include "common/qkv_checks.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {

template <typename Buffer>
ShapeView Shape(const Buffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().size()};
}

inline ArrayType TypeOf(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::BF16:
      return TypeOf(Dtype::kBFloat16);
    case xla::ffi::DataType::F16:
      return TypeOf(Dtype::kFloat16);
    case xla::ffi::DataType::F32:
      return TypeOf(Dtype::kFloat32);
    case xla::ffi::DataType::F8E4M3FN:
      return TypeOf(Dtype::kFloat8E4M3);
    case xla::ffi::DataType::F8E5M2:
      return TypeOf(Dtype::kFloat8E5M2);
    case xla::ffi::DataType::S8:
      return TypeOf(Dtype::kInt8);
    case xla::ffi::DataType::S32:
      return ArrayType::kInt32;
    default:
      return static_cast<ArrayType>(static_cast<int>(ArrayType::kFirstOther) +
                                    static_cast<int>(type));
  }
}

template <typename Buffer>
ArrayType TypeOf(const Buffer& buffer) {
  return TypeOf(buffer.element_type());
}

template <typename Buffer>
Array ArrayOf(const Buffer& buffer) {
  return {buffer.untyped_data(), TypeOf(buffer), Shape(buffer), /*is_given=*/true};
}

// The operands of a call by the names in its attribute "operands", and its attributes: the Source
// of an AttentionReader.
class NamedOperands {
 public:
  NamedOperands(xla::ffi::RemainingArgs arguments, xla::ffi::Dictionary attributes)
      : arguments_(arguments), attributes_(attributes) {
    std::string_view text = Attribute("operands", std::string_view());
    while (!text.empty() && names_.count() < OperandNames::kMost) {
      const size_t end = text.find(',');
      names_.Add(text.substr(0, end));
      text.remove_prefix(end == text.npos ? text.size() : end + 1);
    }
    if (!text.empty() || names_.count() != arguments_.size()) {
      problem_ = "attribute \"operands\": expected a name for each of " +
                 std::to_string(arguments_.size()) + " operands, got " +
                 std::to_string(names_.count());
      names_ = {};
    }
  }

  Array Find(std::string_view name) {
    const int index = names_.Find(name);
    if (index < 0) return {};
    const auto buffer = arguments_.get<xla::ffi::AnyBuffer>(static_cast<size_t>(index));
    return buffer.has_value() ? ArrayOf(*buffer) : Array{};
  }

  template <typename T>
  T Attribute(const char* name, T otherwise) {
    if (!attributes_.contains(name)) return otherwise;
    const auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    problem_ = std::string("attribute \"") + name + "\": " + value.error().message();
    return otherwise;
  }

  const std::string& problem() const { return problem_; }
  std::string Unread() const { return names_.Unread(); }

 private:
  xla::ffi::RemainingArgs arguments_;
  xla::ffi::Dictionary attributes_;
  OperandNames names_;
  std::string problem_;
};

// Checks the operands and results of jax_paged.write_kv and reads the two pools.
inline std::string ReadWriteKv(const xla::ffi::AnyBuffer& k_pages,
                               const xla::ffi::AnyBuffer& v_pages, const xla::ffi::AnyBuffer& k,
                               const xla::ffi::AnyBuffer& v, ShapeView slot_mapping,
                               ShapeView layer, std::string_view layout_name,
                               const xla::ffi::AnyBuffer& k_result,
                               const xla::ffi::AnyBuffer& v_result, PoolShape* k_pool,
                               PoolShape* v_pool) {
  constexpr char kOp[] = "jax_paged.write_kv";
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Dtype k_dtype = Dtype::kFloat32, v_dtype = Dtype::kFloat32;
  Layout layout = Layout::kHnd;
  if (failed(ReadKvDtype(kOp, "k_pages", TypeOf(k_pages), &k_dtype)) ||
      failed(ReadKvDtype(kOp, "v_pages", TypeOf(v_pages), &v_dtype)) ||
      failed(CheckType(kOp, "k", TypeOf(k), TypeOf(k_pages))) ||
      failed(CheckType(kOp, "v", TypeOf(v), TypeOf(v_pages))) ||
      failed(CheckType(kOp, "k_pages result", TypeOf(k_result), TypeOf(k_pages))) ||
      failed(CheckType(kOp, "v_pages result", TypeOf(v_result), TypeOf(v_pages))) ||
      failed(ReadLayout(kOp, layout_name.data(), layout_name.size(), &layout)) ||
      failed(ReadPoolShape(kOp, "k_pages", Shape(k_pages), layout, Pool::kKeys, ByteWidth(k_dtype),
                           k_pool)) ||
      failed(ReadPoolShape(kOp, "v_pages", Shape(v_pages), layout, Pool::kValues,
                           ByteWidth(v_dtype), v_pool)) ||
      failed(CheckSamePool(kOp, *k_pool, *v_pool, Shape(v_pages))) ||
      failed(CheckSameShape(kOp, "k_pages result", Shape(k_result), Shape(k_pages))) ||
      failed(CheckSameShape(kOp, "v_pages result", Shape(v_result), Shape(v_pages))) ||
      failed(CheckRank(kOp, "slot_mapping", slot_mapping, 1)) ||
      failed(CheckShape(kOp, "layer", layer, {}))) {
    return error;
  }
  const int64_t num_tokens = slot_mapping[0], heads = k_pool->num_kv_heads;
  if (failed(CheckShape(kOp, "k", Shape(k), {num_tokens, heads, k_pool->head_dim}))) return error;
  return CheckShape(kOp, "v", Shape(v), {num_tokens, heads, v_pool->head_dim});
}

// The operands, attributes and results of jax_paged.qkv_norm_rope_write, behind the contexts that a
// platform asks for.
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

// The pages of one pool as XLA gives them: mostly the same memory twice.
struct PagesOfCall {
  xla::ffi::AnyBuffer operand, result;
};

// What `BindQkv` binds: reads a call and has RUN(context, params, K's and V's pages) do it.
template <auto RUN, typename Context>
xla::ffi::Error HandleQkv(Context context, xla::ffi::AnyBuffer qkv, xla::ffi::AnyBuffer k_pages,
                          xla::ffi::AnyBuffer v_pages, xla::ffi::Buffer<xla::ffi::S32> positions,
                          xla::ffi::Buffer<xla::ffi::S32> slot_mapping,
                          xla::ffi::Buffer<xla::ffi::F32> cos, xla::ffi::Buffer<xla::ffi::F32> sin,
                          xla::ffi::AnyBuffer q_norm, xla::ffi::AnyBuffer k_norm,
                          xla::ffi::Buffer<xla::ffi::S32> layer, float eps, std::string_view style,
                          std::string_view layout, xla::ffi::Result<xla::ffi::AnyBuffer> q,
                          xla::ffi::Result<xla::ffi::AnyBuffer> k_result,
                          xla::ffi::Result<xla::ffi::AnyBuffer> v_result) {
  QkvParams params = {};
  const std::string error =
      ReadQkv({ArrayOf(qkv), ArrayOf(k_pages), ArrayOf(v_pages), ArrayOf(positions),
               ArrayOf(slot_mapping), ArrayOf(cos), ArrayOf(sin), ArrayOf(q_norm), ArrayOf(k_norm),
               ArrayOf(layer), ArrayOf(*q), ArrayOf(*k_result), ArrayOf(*v_result)},
              eps, style, layout, &params);
  if (!error.empty()) return xla::ffi::Error::InvalidArgument(error);
  const PagesOfCall pages[] = {{k_pages, *k_result}, {v_pages, *v_result}};
  return RUN(context, params, pages);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_FFI_CHECKS_H_
