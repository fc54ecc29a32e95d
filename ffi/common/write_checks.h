// SPDX-License-Identifier: Apache-2.0

// A call of jax_paged.write_kv, and what it is checked for, on CPU, on CUDA and in the emulator.
// Knows nothing of XLA.

#ifndef JAX_PAGED_COMMON_WRITE_CHECKS_H_
#define JAX_PAGED_COMMON_WRITE_CHECKS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/page_view.h"

namespace jax_paged {

inline constexpr char kWriteKvOp[] = "jax_paged.write_kv";

// Layout rpa: k_pages hold V too, and v_pages and their result have no elements.
struct WriteKvArrays {
  Array k_pages, v_pages, k, v, slot_mapping, layer;
  Array k_result, v_result;
};

struct WriteKvParams {
  const void* k;                // [num_tokens, num_kv_heads, head_dim], of the dtype of k_pages
  const void* v;                // the same of V
  const int32_t* slot_mapping;  // [num_tokens]
  const int32_t* layer;         // scalar
  void* k_pages;                // k_pool
  void* v_pages;                // v_pool: its first row
  PoolShape k_pool;
  PoolShape v_pool;
  int64_t num_tokens;
};

// Checks all and fills `params`, whose pages are those of the results.
inline std::string ReadWriteKv(WriteKvArrays in, std::string_view layout_name,
                               WriteKvParams* params) {
  constexpr auto& kOp = kWriteKvOp;
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  WriteKvParams& p = *params;
  Dtype k_dtype = Dtype::kFloat32, v_dtype = Dtype::kFloat32;
  Layout layout = Layout::kHnd;
  if (failed(ReadKvDtype(kOp, "k_pages", in.k_pages.type, &k_dtype)) ||
      failed(ReadKvDtype(kOp, "v_pages", in.v_pages.type, &v_dtype)) ||
      failed(CheckType(kOp, "k", in.k.type, in.k_pages.type)) ||
      failed(CheckType(kOp, "v", in.v.type, in.v_pages.type)) ||
      failed(CheckType(kOp, "k_pages result", in.k_result.type, in.k_pages.type)) ||
      failed(CheckType(kOp, "v_pages result", in.v_result.type, in.v_pages.type)) ||
      failed(CheckType(kOp, "slot_mapping", in.slot_mapping.type, TypeOf<int32_t>())) ||
      failed(CheckType(kOp, "layer", in.layer.type, TypeOf<int32_t>())) ||
      failed(ReadLayout(kOp, layout_name.data(), layout_name.size(), &layout))) {
    return error;
  }
  if (layout == Layout::kRpa) {
    if (failed(CheckShape(kOp, "v_pages", in.v_pages.shape, {0})) ||
        failed(CheckType(kOp, "v_pages", in.v_pages.type, in.k_pages.type))) {
      return error;
    }
    in.v_pages = in.k_pages;
    in.v_result = in.k_result;
  }
  if (failed(ReadPoolShape(kOp, "k_pages", in.k_pages.shape, layout, Pool::kKeys,
                           ByteWidth(k_dtype), &p.k_pool)) ||
      failed(ReadPoolShape(kOp, "v_pages", in.v_pages.shape, layout, Pool::kValues,
                           ByteWidth(v_dtype), &p.v_pool)) ||
      failed(CheckSamePool(kOp, p.k_pool, p.v_pool, in.v_pages.shape)) ||
      failed(CheckSameShape(kOp, "k_pages result", in.k_result.shape, in.k_pages.shape)) ||
      failed(CheckSameShape(kOp, "v_pages result", in.v_result.shape, in.v_pages.shape)) ||
      failed(CheckRank(kOp, "slot_mapping", in.slot_mapping.shape, 1)) ||
      failed(CheckShape(kOp, "layer", in.layer.shape, {}))) {
    return error;
  }
  const int64_t heads = p.k_pool.num_kv_heads;
  p.num_tokens = in.slot_mapping.shape[0];
  if (failed(CheckShape(kOp, "k", in.k.shape, {p.num_tokens, heads, p.k_pool.head_dim})) ||
      failed(CheckShape(kOp, "v", in.v.shape, {p.num_tokens, heads, p.v_pool.head_dim}))) {
    return error;
  }
  p.k = in.k.data;
  p.v = in.v.data;
  p.slot_mapping = static_cast<const int32_t*>(in.slot_mapping.data);
  p.layer = static_cast<const int32_t*>(in.layer.data);
  p.k_pages = in.k_result.data;
  p.v_pages = static_cast<char*>(in.v_result.data) + p.v_pool.first_byte();
  return "";
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_WRITE_CHECKS_H_
