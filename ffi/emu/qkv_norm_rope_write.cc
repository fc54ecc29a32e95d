// SPDX-License-Identifier: Apache-2.0

// C interface of the emulated qkv_norm_rope_write kernel, for ctypes
// (tests/ops/test_qkv_norm_rope_write.py).

#include <cstdint>
#include <string>

#include "cuda/qkv_norm_rope_write/kernel.cuh"
#include "cuda/qkv_norm_rope_write/select.h"
#include "emu/machine.h"

namespace {

namespace cuda = jax_paged::cuda;
namespace emu = jax_paged::emu;

struct Launch {
  const cuda::QkvArgs& args;
  uint32_t seed;

  template <typename T, int VEC>
  std::string operator()() const {
    return emu::Launch({cuda::NumCtas(args), cuda::kQkvThreads, cuda::kQkvSharedBytes, seed},
                       [&] { cuda::QkvCta<T, VEC>(args); });
  }
};

}  // namespace

extern "C" {

// The test has the same struct, field by field.
struct EmulatedQkv {
  const void* qkv;
  const int32_t* positions;
  const int32_t* slot_mapping;
  const float* cos;
  const float* sin;
  const void* q_norm;  // null: none
  const void* k_norm;
  const int32_t* layer;
  void* q;
  void* k_pages;
  void* v_pages;
  int64_t num_layers;
  int64_t num_pages;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t head_dim;
  int64_t v_head_dim;
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t max_positions;
  int64_t half;
  float eps;
  int32_t interleaved;
  int32_t layout;      // Layout
  int32_t dtype;       // Dtype
  int32_t norm_dtype;  // Dtype
  uint32_t seed;
};

// Returns "" or what went wrong.
const char* emulate_qkv(const EmulatedQkv* in) {
  static std::string error;
  jax_paged::QkvParams params = {};
  params.qkv = in->qkv;
  params.positions = in->positions;
  params.slot_mapping = in->slot_mapping;
  params.cos = in->cos;
  params.sin = in->sin;
  params.q_norm = in->q_norm;
  params.k_norm = in->k_norm;
  params.layer = in->layer;
  params.q = in->q;
  params.k_pages = in->k_pages;
  params.v_pages = in->v_pages;
  params.num_tokens = in->num_tokens;
  params.num_q_heads = in->num_q_heads;
  params.max_positions = in->max_positions;
  params.half = in->half;
  params.eps = in->eps;
  params.interleaved = in->interleaved != 0;
  params.dtype = static_cast<jax_paged::Dtype>(in->dtype);
  params.norm_dtype = static_cast<jax_paged::Dtype>(in->norm_dtype);
  const int64_t element_bytes = jax_paged::ByteWidth(params.dtype);
  params.k_pool = {in->num_layers,
                   in->num_pages,
                   in->num_kv_heads,
                   in->page_size,
                   in->head_dim,
                   element_bytes,
                   static_cast<jax_paged::Layout>(in->layout),
                   jax_paged::Pool::kKeys};
  params.v_pool = params.k_pool;
  params.v_pool.head_dim = in->v_head_dim;
  params.v_pool.pool = jax_paged::Pool::kValues;

  const int64_t table_bytes = in->max_positions * in->half * 4;
  const int64_t norm_bytes = in->head_dim * jax_paged::ByteWidth(params.norm_dtype);
  const int64_t q_bytes = in->num_tokens * in->num_q_heads * in->head_dim * element_bytes;
  emu::ClearRegions();
  emu::AddRegion("qkv", in->qkv, in->num_tokens * params.width() * element_bytes,
                 /*is_input=*/true);
  emu::AddRegion("positions", in->positions, in->num_tokens * 4, true);
  emu::AddRegion("slot_mapping", in->slot_mapping, in->num_tokens * 4, true);
  emu::AddRegion("cos", in->cos, table_bytes, true);
  emu::AddRegion("sin", in->sin, table_bytes, true);
  if (in->q_norm) emu::AddRegion("q_norm", in->q_norm, norm_bytes, true);
  if (in->k_norm) emu::AddRegion("k_norm", in->k_norm, norm_bytes, true);
  emu::AddRegion("layer", in->layer, 4, true);
  emu::AddRegion("q", in->q, q_bytes, /*is_input=*/false);
  emu::AddRegion("k_pages", in->k_pages, in->num_layers * params.k_pool.layer_bytes(), false);
  emu::AddRegion("v_pages", in->v_pages, in->num_layers * params.v_pool.layer_bytes(), false);
  cuda::QkvArgs args;
  if (!cuda::MakeQkvArgs(params, &args)) {
    error = "too many CTAs";
  } else {
    error = SelectQkv(params.dtype, args, Launch{args, in->seed});
  }
  return error.c_str();
}

}  // extern "C"
