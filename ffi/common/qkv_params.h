// SPDX-License-Identifier: Apache-2.0

// One call of qkv_norm_rope_write. Knows nothing of XLA or of a device.

#ifndef JAX_PAGED_COMMON_QKV_PARAMS_H_
#define JAX_PAGED_COMMON_QKV_PARAMS_H_

#include <cstdint>

#include "common/dtypes.h"
#include "common/page_view.h"

namespace jax_paged {

inline constexpr int64_t kMaxQkvHeadDim = 512;  // the kernels' rows are a multiple of 8 up to this

// What K or V of 8-bit pages is divided by. Both null: 1.
struct QkvScale {
  const float* given;  // [num_kv_heads], of the layer
  float* computed;     // a pool of shape ScalePool(): max |x| / LargestCode of a token's head
};

// The shape of scales [num_layers, num_pages, num_kv_heads, page_size] beside pages.
inline PoolShape ScalePool(const PoolShape& pages) {
  return {pages.num_layers,
          pages.num_pages,
          pages.num_kv_heads,
          pages.page_size,
          /*head_dim=*/1,
          /*element_bytes=*/sizeof(float),
          Layout::kHnd,
          Pool::kKeys};
}

struct QkvParams {
  const void* qkv;              // [num_tokens, width()], dtype: the heads of q, then k, then v
  const int32_t* positions;     // [num_tokens], rows of cos and sin
  const int32_t* slot_mapping;  // [num_tokens]
  const float* cos;             // [max_positions, half]
  const float* sin;             // the same
  const void* q_norm;           // [head_dim], norm_dtype; null: none
  const void* k_norm;           // the same
  const int32_t* layer;         // scalar
  void* q;                      // [num_tokens, num_q_heads, head_dim], dtype
  void* k_pages;                // k_pool, kv_dtype
  void* v_pages;                // v_pool, kv_dtype: its first row
  QkvScale k_scale;             // of 8-bit pages
  QkvScale v_scale;
  PoolShape k_pool;
  PoolShape v_pool;
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t max_positions;
  int64_t half;  // rotary_dim / 2: pairs of a head that turn
  float eps;
  bool interleaved;  // pairs are (2i, 2i + 1), not (i, i + half)
  Dtype dtype;
  Dtype kv_dtype;  // dtype, or 8-bit
  Dtype norm_dtype;

  int64_t num_heads() const { return num_q_heads + 2 * k_pool.num_kv_heads; }
  int64_t width() const {
    return (num_q_heads + k_pool.num_kv_heads) * k_pool.head_dim +
           v_pool.num_kv_heads * v_pool.head_dim;
  }
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_QKV_PARAMS_H_
