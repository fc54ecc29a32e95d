// SPDX-License-Identifier: Apache-2.0

// What the CUDA kernel of qkv_norm_rope_write is told about one call. Knows nothing of XLA; plain
// C++17, so that handler, kernel and emulator share it.

#ifndef JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_ARGS_H_
#define JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_ARGS_H_

#include <cstdint>

#include "common/integers.h"
#include "common/page_view.h"
#include "common/qkv_params.h"
#include "cuda/pointers.h"
#include "cuda/written_tokens.h"

namespace jax_paged::cuda {

inline constexpr int32_t kQkvThreads = 128;
inline constexpr int32_t kLaneElements = 16;  // of a head, in the registers of one lane
inline constexpr int32_t kWholeRow = 31;      // an atom_shift
static_assert(kLaneElements * 32 == kMaxQkvHeadDim, "a warp holds the widest head");

// Where K or V goes.
struct QkvPool {
  Global<char> pages;  // the pool's first row
  PoolSlots slots;
  int32_t atom_shift;               // log2 of an atom's bytes; kWholeRow where a row is one atom
  Global<const float> given_scale;  // [num_kv_heads] of 8-bit pages; null: see computed_scale
  Global<char> computed_scale;      // the pool of scales; null: none, and without both scales are 1
};

struct QkvArgs {
  Global<const char> qkv;  // [num_tokens, width]
  WrittenTokens tokens;
  Global<const int32_t> layer;  // scalar
  Global<const float> cos;      // [max_positions, half]
  Global<const float> sin;
  Global<const char> q_norm;  // [head_dim], if has_q_norm
  Global<const char> k_norm;
  Global<char> q;         // [num_tokens, num_q_heads, head_dim]
  QkvPool pools[2];       // K, V
  PoolSlots scale_slots;  // of both pools of scales

  int64_t width;  // elements of qkv per token
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;
  int32_t half;
  int32_t chunk_elements;  // what a lane loads at once: 2, 4 or 8
  int32_t lanes_per_head;  // 1, 2, 4, ... 32
  int32_t ctas_per_token;
  float eps;
  bool interleaved;
  bool has_q_norm;
  bool has_k_norm;
  bool norm_is_f32;
  bool is_eight_bit;     // pages hold codes of kv_dtype
  bool computes_scales;  // of K or of V
  Dtype kv_dtype;
  float scale_of_largest;  // 1 / LargestCode(kv_dtype)
};

inline QkvPool MakeQkvPool(const PoolShape& shape, void* pages, const QkvScale& scale) {
  QkvPool pool = {};
  pool.pages = Global<char>(static_cast<char*>(pages));
  pool.slots = MakePoolSlots(shape);
  pool.atom_shift = kWholeRow;
  if (shape.layout == Layout::kVllm5d) {
    pool.atom_shift = 0;
    while (int64_t{1} << pool.atom_shift < pool.slots.strides.atom_bytes) ++pool.atom_shift;
  }
  if (scale.given) pool.given_scale = Global<const float>(scale.given);
  if (scale.computed) {
    pool.computed_scale = Global<char>(reinterpret_cast<char*>(scale.computed));
  }
  return pool;
}

// The launch depends on shapes and attributes alone.
inline int32_t NumCtas(const QkvArgs& args) { return args.tokens.num_tokens * args.ctas_per_token; }

// workspace: as CheckWrittenTokens asks for, which says too whether a grid takes all the CTAs.
inline QkvArgs MakeQkvArgs(const QkvParams& in, int32_t* workspace) {
  QkvArgs args = {};
  args.qkv = Global<const char>(static_cast<const char*>(in.qkv));
  args.tokens = MakeWrittenTokens(in.slot_mapping, in.positions, in.num_tokens, in.max_positions,
                                  in.k_pool.num_slots(), workspace);
  args.layer = Global<const int32_t>(in.layer);
  args.cos = Global<const float>(in.cos);
  args.sin = Global<const float>(in.sin);
  args.q_norm = Global<const char>(static_cast<const char*>(in.q_norm));
  args.k_norm = Global<const char>(static_cast<const char*>(in.k_norm));
  args.q = Global<char>(static_cast<char*>(in.q));
  args.pools[0] = MakeQkvPool(in.k_pool, in.k_pages, in.k_scale);
  args.pools[1] = MakeQkvPool(in.v_pool, in.v_pages, in.v_scale);
  args.scale_slots = MakePoolSlots(ScalePool(in.k_pool));
  args.kv_dtype = in.kv_dtype;
  args.is_eight_bit = IsEightBit(in.kv_dtype);
  args.computes_scales = in.k_scale.computed || in.v_scale.computed;
  args.scale_of_largest = 1.0f / LargestCode(in.kv_dtype);
  args.width = in.width();
  args.num_q_heads = static_cast<int32_t>(in.num_q_heads);
  args.num_kv_heads = static_cast<int32_t>(in.k_pool.num_kv_heads);
  args.head_dim = static_cast<int32_t>(in.k_pool.head_dim);
  args.v_head_dim = static_cast<int32_t>(in.v_pool.head_dim);
  args.half = static_cast<int32_t>(in.half);
  args.eps = in.eps;
  args.interleaved = in.interleaved;
  args.has_q_norm = in.q_norm != nullptr;
  args.has_k_norm = in.k_norm != nullptr;
  args.norm_is_f32 = in.norm_dtype == Dtype::kFloat32;

  // The widest chunk, up to 16 bytes, that cuts a head's turning part into whole chunks: its two
  // halves where a pair spans them.
  const int32_t turning = in.interleaved ? 2 * args.half : args.half;
  args.chunk_elements = static_cast<int32_t>(16 / ByteWidth(in.dtype));
  while (turning % args.chunk_elements != 0) args.chunk_elements /= 2;
  const int32_t widest = args.head_dim > args.v_head_dim ? args.head_dim : args.v_head_dim;
  args.lanes_per_head = 1;
  while (args.lanes_per_head < 32 && args.lanes_per_head * 2 * args.chunk_elements < widest) {
    args.lanes_per_head *= 2;
  }
  const int64_t heads_per_cta = kQkvThreads / args.lanes_per_head;
  args.ctas_per_token = static_cast<int32_t>(CeilDiv(in.num_heads(), heads_per_cta));
  return args;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_ARGS_H_
