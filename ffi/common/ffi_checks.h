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
#include "common/write_checks.h"
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

// The pages of one pool, or its scales, as XLA gives them: mostly the same memory twice. A result
// of no elements is that of no pool.
struct PagesOfCall {
  xla::ffi::AnyBuffer operand, result;
};

// The operands, attributes and results of jax_paged.write_kv, behind the contexts that a platform
// asks for.
template <typename Binding>
auto BindWriteKv(Binding&& binding) {
  namespace ffi = xla::ffi;
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()         // k_pages
      .template Arg<ffi::AnyBuffer>()         // v_pages
      .template Arg<ffi::AnyBuffer>()         // k
      .template Arg<ffi::AnyBuffer>()         // v
      .template Arg<ffi::Buffer<ffi::S32>>()  // slot_mapping
      .template Arg<ffi::Buffer<ffi::S32>>()  // layer
      .template Attr<std::string_view>("layout")
      .template Ret<ffi::AnyBuffer>()   // k_pages
      .template Ret<ffi::AnyBuffer>();  // v_pages
}

// What `BindWriteKv` binds, and a workspace where the platform binds one behind it: reads a call
// and has RUN(context, params, K's and V's pages, workspace) do it.
template <auto RUN, typename Context, typename... Workspace>
xla::ffi::Error HandleWriteKv(Context context, xla::ffi::AnyBuffer k_pages,
                              xla::ffi::AnyBuffer v_pages, xla::ffi::AnyBuffer k,
                              xla::ffi::AnyBuffer v, xla::ffi::Buffer<xla::ffi::S32> slot_mapping,
                              xla::ffi::Buffer<xla::ffi::S32> layer, std::string_view layout,
                              xla::ffi::Result<xla::ffi::AnyBuffer> k_result,
                              xla::ffi::Result<xla::ffi::AnyBuffer> v_result,
                              Workspace... workspace) {
  WriteKvParams params = {};
  const std::string error =
      ReadWriteKv({ArrayOf(k_pages), ArrayOf(v_pages), ArrayOf(k), ArrayOf(v),
                   ArrayOf(slot_mapping), ArrayOf(layer), ArrayOf(*k_result), ArrayOf(*v_result)},
                  layout, &params);
  if (!error.empty()) return xla::ffi::Error::InvalidArgument(error);
  const PagesOfCall pages[] = {{k_pages, *k_result}, {v_pages, *v_result}};
  return RUN(context, params, pages, workspace...);
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
      .template Arg<ffi::AnyBuffer>()         // k_scale
      .template Arg<ffi::AnyBuffer>()         // v_scale
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
      .template Ret<ffi::AnyBuffer>()   // v_pages
      .template Ret<ffi::AnyBuffer>()   // k_scale
      .template Ret<ffi::AnyBuffer>();  // v_scale
}

// What `BindQkv` binds, and a workspace: see `HandleWriteKv`.
template <auto RUN, typename Context, typename... Workspace>
xla::ffi::Error HandleQkv(Context context, xla::ffi::AnyBuffer qkv, xla::ffi::AnyBuffer k_pages,
                          xla::ffi::AnyBuffer v_pages, xla::ffi::AnyBuffer k_scale,
                          xla::ffi::AnyBuffer v_scale, xla::ffi::Buffer<xla::ffi::S32> positions,
                          xla::ffi::Buffer<xla::ffi::S32> slot_mapping,
                          xla::ffi::Buffer<xla::ffi::F32> cos, xla::ffi::Buffer<xla::ffi::F32> sin,
                          xla::ffi::AnyBuffer q_norm, xla::ffi::AnyBuffer k_norm,
                          xla::ffi::Buffer<xla::ffi::S32> layer, float eps, std::string_view style,
                          std::string_view layout, xla::ffi::Result<xla::ffi::AnyBuffer> q,
                          xla::ffi::Result<xla::ffi::AnyBuffer> k_result,
                          xla::ffi::Result<xla::ffi::AnyBuffer> v_result,
                          xla::ffi::Result<xla::ffi::AnyBuffer> k_scale_result,
                          xla::ffi::Result<xla::ffi::AnyBuffer> v_scale_result,
                          Workspace... workspace) {
  QkvParams params = {};
  const std::string error =
      ReadQkv({ArrayOf(qkv), ArrayOf(k_pages), ArrayOf(v_pages), ArrayOf(k_scale), ArrayOf(v_scale),
               ArrayOf(positions), ArrayOf(slot_mapping), ArrayOf(cos), ArrayOf(sin),
               ArrayOf(q_norm), ArrayOf(k_norm), ArrayOf(layer), ArrayOf(*q), ArrayOf(*k_result),
               ArrayOf(*v_result), ArrayOf(*k_scale_result), ArrayOf(*v_scale_result)},
              eps, style, layout, &params);
  if (!error.empty()) return xla::ffi::Error::InvalidArgument(error);
  const PagesOfCall pages[] = {{k_pages, *k_result},
                               {v_pages, *v_result},
                               {k_scale, *k_scale_result},
                               {v_scale, *v_scale_result}};
  return RUN(context, params, pages, workspace...);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_FFI_CHECKS_H_
