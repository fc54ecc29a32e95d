// SPDX-License-Identifier: Apache-2.0

// qkv_norm_rope_write: splits the projected q, k and v of each token, normalises and turns the
// heads of q and k, writes K and V to their page slots and q to its result.
//
// Grid: num_tokens x ctas_per_token CTAs of 128 threads, a function of shapes alone. A head belongs
// to lanes_per_head neighbouring lanes (8 for 128 dims of bf16), so a warp takes up to 32 heads at
// once. A lane holds chunks of up to 16 bytes: chunk c and, where pairs are (i, i + half), the
// chunk half a turning part further, so that both of a pair are in one lane. The mean square
// crosses the lanes of a head by shuffles. Everything is f32 between one load and one store; V
// passes as it is.
//
// Shared memory: one word per warp. Bound by memory: each element is read once and written once;
// the rows of cos and sin come from L1 or L2 for all heads but the first.
//
// Of several tokens for one slot the last one that is written wins whole: a CTA with heads of K or
// V first asks whether a later one has the slot. written_tokens.cuh says how it knows.

#ifndef JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_KERNEL_CUH_
#define JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_KERNEL_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/codes.cuh"
#include "cuda/prim.h"
#include "cuda/qkv_norm_rope_write/args.h"
#include "cuda/written_tokens.cuh"

namespace jax_paged::cuda {

inline constexpr int32_t kQkvWarps = kQkvThreads / kWarpLanes;
inline constexpr int32_t kQkvSharedBytes = kQkvWarps * 4;

// What is stored at once, by its bytes.
template <int BYTES>
using WordOf = std::conditional_t<
    BYTES == 16, Word4,
    std::conditional_t<BYTES == 8, Word2,
                       std::conditional_t<BYTES == 4, uint32_t,
                                          std::conditional_t<BYTES == 2, uint16_t, uint8_t>>>>;

// Stores BYTES bytes of elements. apart: the distance of elements in bytes; 0: they are neighbours.
template <int BYTES, int ELEMENT_BYTES>
JAX_PAGED_DEVICE void StoreElements(Global<char> to, const uint32_t (&words)[(BYTES + 3) / 4],
                                    int64_t apart) {
  if (apart == 0) {
    if constexpr (BYTES == 2) {
      prim::Store(to.As<uint16_t>(), static_cast<uint16_t>(words[0]));
    } else {
      prim::Store(to.As<WordOf<BYTES>>(), prim::BitCast<WordOf<BYTES>>(words));
    }
    return;
  }
  using Element = WordOf<ELEMENT_BYTES>;
  JAX_PAGED_UNROLL
  for (int32_t b = 0; b < BYTES; b += ELEMENT_BYTES) {
    prim::Store((to + b / ELEMENT_BYTES * apart).As<Element>(),
                static_cast<Element>(words[b / 4] >> b % 4 * 8));
  }
}

// VEC elements of T, read and written at once.
template <typename T, int VEC>
struct QkvChunk {
  static constexpr int32_t kBytes = VEC * static_cast<int32_t>(sizeof(T));
  using Word = WordOf<kBytes>;
  struct Words {
    uint32_t word[kBytes / 4];
  };

  JAX_PAGED_DEVICE static void Load(Global<const char> from, float (&x)[VEC]) {
    const Words in = prim::BitCast<Words>(prim::LoadConst(from.As<const Word>()));
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < VEC; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = prim::BitCast<float>(in.word[i]);
      } else {
        const uint32_t half = in.word[i / 2] >> (i % 2 * 16);
        x[i] = prim::ToFloat(T{static_cast<uint16_t>(half)});
      }
    }
  }

  JAX_PAGED_DEVICE static void Store(Global<char> to, const float (&x)[VEC], int64_t apart) {
    uint32_t words[kBytes / 4];
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = prim::BitCast<uint32_t>(x[i]);
      } else {
        words[i] = prim::PackPair<T>(x[2 * i], x[2 * i + 1]);
      }
    }
    StoreElements<kBytes, static_cast<int>(sizeof(T))>(to, words, apart);
  }

  // The codes of x / scale.
  JAX_PAGED_DEVICE static void StoreCodes(Global<char> to, const float (&x)[VEC], Dtype dtype,
                                          float scale, int64_t apart) {
    uint32_t words[(VEC + 3) / 4] = {};
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < VEC; ++i) {
      words[i / 4] |= EightBitCode(dtype, x[i] / scale) << i % 4 * 8;
    }
    StoreElements<VEC, 1>(to, words, apart);
  }
};

// N floats from an address aligned to them, or to 16 bytes.
template <int N>
JAX_PAGED_DEVICE void LoadFloats(Global<const float> from, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = prim::LoadConst(from);
  } else {
    constexpr int kStep = N < 4 ? N : 4;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < N; i += kStep) {
      float part[kStep];
      QkvChunk<float, kStep>::Load((from + i).template As<const char>(), part);
      JAX_PAGED_UNROLL
      for (int32_t j = 0; j < kStep; ++j) x[i + j] = part[j];
    }
  }
}

// Turns the pair (a, b) by the angle of cos and sin.
JAX_PAGED_DEVICE void Turn(float* a, float* b, float cos, float sin) {
  const float first = *a * cos - *b * sin;
  *b = *b * cos + *a * sin;
  *a = first;
}

// The largest magnitude of a head, of which the lane has x; NaN where it has one.
template <int PAIRS, int VEC>
JAX_PAGED_DEVICE float LargestOfHead(const float (&x)[PAIRS][2][VEC], int32_t lanes_per_head) {
  uint32_t largest = 0;  // as bits, of which those of NaN are the largest
  const auto take = [&](uint32_t bits) { largest = bits > largest ? bits : largest; };
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < PAIRS; ++i) {
    JAX_PAGED_UNROLL
    for (int32_t j = 0; j < 2; ++j) {
      JAX_PAGED_UNROLL
      for (int32_t e = 0; e < VEC; ++e) take(prim::BitCast<uint32_t>(x[i][j][e]) & 0x7fffffffu);
    }
  }
  for (int32_t mask = lanes_per_head / 2; mask > 0; mask /= 2) {
    take(prim::ShuffleXor(largest, mask));
  }
  return prim::BitCast<float>(largest);
}

template <typename T, int VEC>
JAX_PAGED_DEVICE void QkvCta(const QkvArgs& args) {
  using Chunk = QkvChunk<T, VEC>;
  constexpr int32_t kPairs = kLaneElements / (2 * VEC);  // of chunks, per lane
  const int32_t token = prim::BlockIndex() / args.ctas_per_token;
  const int32_t heads_per_cta = kQkvThreads / args.lanes_per_head;
  const int32_t first_head = (prim::BlockIndex() - token * args.ctas_per_token) * heads_per_cta;
  const int32_t position = prim::LoadConst(args.tokens.positions + token);
  const bool has_position = position >= 0 && position < args.tokens.max_positions;

  // This lane's head and its row of qkv.
  const int32_t lane = prim::ThreadIndex() % args.lanes_per_head;
  const int32_t head = first_head + prim::ThreadIndex() / args.lanes_per_head;
  const int32_t first_k = args.num_q_heads, first_v = args.num_q_heads + args.num_kv_heads;
  const bool is_v = head >= first_v;
  const bool is_q = head < first_k;
  const bool is_head = head < first_v + args.num_kv_heads;
  const int32_t dim = is_v ? args.v_head_dim : args.head_dim;
  const int64_t column =
      is_v ? int64_t{first_v} * args.head_dim + int64_t{head - first_v} * args.v_head_dim
           : int64_t{head} * args.head_dim;
  const Global<const char> row =
      args.qkv + (token * args.width + column) * static_cast<int64_t>(sizeof(T));

  // The lane's i-th pair of chunks. The first `spans` pairs of a head are `spans` chunks apart (the
  // two halves of the turning part); what follows is paired over half of its length.
  const int32_t chunks = is_head ? dim / VEC : 0;
  const int32_t spans = is_v || args.interleaved ? 0 : args.half / VEC;
  const int32_t rest = (chunks - 2 * spans + 1) / 2;
  const auto first_chunk = [&](int32_t i) {
    const int32_t pair = lane + i * args.lanes_per_head;
    return pair < spans ? pair : (pair < spans + rest ? pair + spans : chunks);
  };
  const auto second_chunk = [&](int32_t i) {
    const int32_t pair = lane + i * args.lanes_per_head;
    return pair < spans ? pair + spans : pair + spans + rest;
  };

  float x[kPairs][2][VEC] = {};
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < kPairs; ++i) {
    const int32_t chunk[2] = {first_chunk(i), second_chunk(i)};
    JAX_PAGED_UNROLL
    for (int32_t j = 0; j < 2; ++j) {
      if (chunk[j] < chunks) Chunk::Load(row + int64_t{chunk[j]} * Chunk::kBytes, x[i][j]);
    }
  }

  bool writes = false;
  int32_t slot = -1, layer = -1;
  if (first_head + heads_per_cta > first_k) {  // the same for all threads, and so is the barrier
    slot = prim::LoadConst(args.tokens.slot_mapping + token);
    layer = prim::LoadConst(args.layer);
    writes = has_position && args.pools[0].slots.IsSlot(layer, slot) &&
             !IsOverwritten<kQkvThreads>(args.tokens, token, slot);
  }

  if (args.has_q_norm || args.has_k_norm) {
    float sum = 0.0f;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kPairs; ++i) {
      JAX_PAGED_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        JAX_PAGED_UNROLL
        for (int32_t e = 0; e < VEC; ++e) sum = prim::Fma(x[i][j][e], x[i][j][e], sum);
      }
    }
    for (int32_t mask = args.lanes_per_head / 2; mask > 0; mask /= 2) {
      sum += prim::ShuffleXor(sum, mask);
    }
    if (is_q ? args.has_q_norm : args.has_k_norm && !is_v) {
      const float factor = prim::ReciprocalSqrt(sum / static_cast<float>(dim) + args.eps);
      const Global<const char> weights = is_q ? args.q_norm : args.k_norm;
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kPairs; ++i) {
        const int32_t chunk[2] = {first_chunk(i), second_chunk(i)};
        JAX_PAGED_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          if (chunk[j] >= chunks) continue;
          float weight[VEC];
          const int64_t first = int64_t{chunk[j]} * VEC;
          if (args.norm_is_f32) {
            LoadFloats<VEC>(weights.As<const float>() + first, weight);
          } else {
            Chunk::Load(weights + first * static_cast<int64_t>(sizeof(T)), weight);
          }
          JAX_PAGED_UNROLL
          for (int32_t e = 0; e < VEC; ++e) x[i][j][e] = x[i][j][e] * factor * weight[e];
        }
      }
    }
  }

  if (has_position && !is_v) {
    const int64_t table = int64_t{position} * args.half;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kPairs; ++i) {
      const int32_t chunk[2] = {first_chunk(i), second_chunk(i)};
      if (args.interleaved) {
        JAX_PAGED_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          if (chunk[j] >= chunks || chunk[j] * VEC >= 2 * args.half) continue;
          float cos[VEC / 2], sin[VEC / 2];
          LoadFloats<VEC / 2>(args.cos + (table + chunk[j] * (VEC / 2)), cos);
          LoadFloats<VEC / 2>(args.sin + (table + chunk[j] * (VEC / 2)), sin);
          JAX_PAGED_UNROLL
          for (int32_t e = 0; e < VEC / 2; ++e) {
            Turn(&x[i][j][2 * e], &x[i][j][2 * e + 1], cos[e], sin[e]);
          }
        }
      } else if (chunk[0] < spans) {
        float cos[VEC], sin[VEC];
        LoadFloats<VEC>(args.cos + (table + chunk[0] * VEC), cos);
        LoadFloats<VEC>(args.sin + (table + chunk[0] * VEC), sin);
        JAX_PAGED_UNROLL
        for (int32_t e = 0; e < VEC; ++e) Turn(&x[i][0][e], &x[i][1][e], cos[e], sin[e]);
      }
    }
  }

  const QkvPool& pool = args.pools[is_v ? 1 : 0];
  const int32_t kv_head = head - (is_v ? first_v : first_k);
  float largest = 0.0f;
  if (args.computes_scales) largest = LargestOfHead(x, args.lanes_per_head);

  if (!is_head || !(is_q || writes)) return;
  const bool is_code = args.is_eight_bit && !is_q;
  Global<char> target;
  float scale = 1.0f;
  if (is_q) {
    const int64_t q_row = int64_t{token} * args.num_q_heads + head;
    target = args.q + q_row * args.head_dim * static_cast<int64_t>(sizeof(T));
  } else {
    target = pool.pages + pool.slots.Offset(layer, slot, kv_head);
    if (pool.given_scale) scale = prim::LoadConst(pool.given_scale + kv_head);
    if (pool.computed_scale) {
      scale = largest * args.scale_of_largest;
      const Global<char> to = pool.computed_scale + args.scale_slots.Offset(layer, slot, kv_head);
      if (lane == 0) prim::Store(to.As<float>(), scale);
    }
    if (scale == 0.0f) scale = 1.0f;
  }

  // Where rows are cut into atoms, a chunk lies within one, or each of its elements is one.
  const int32_t atom_shift = is_q ? kWholeRow : pool.atom_shift;
  const int32_t chunk_bytes = is_code ? VEC : Chunk::kBytes;
  const int64_t atom = pool.slots.strides.atom;
  const int64_t apart = chunk_bytes >> atom_shift > 1 ? atom : 0;
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < kPairs; ++i) {
    const int32_t chunk[2] = {first_chunk(i), second_chunk(i)};
    JAX_PAGED_UNROLL
    for (int32_t j = 0; j < 2; ++j) {
      if (chunk[j] >= chunks) continue;
      if (!has_position) {
        JAX_PAGED_UNROLL
        for (int32_t e = 0; e < VEC; ++e) x[i][j][e] = 0.0f;
      }
      const uint32_t byte = static_cast<uint32_t>(chunk[j] * chunk_bytes);
      const Global<char> to =
          target + ((byte >> atom_shift) * atom + (byte & ((1u << atom_shift) - 1)));
      if (is_code) {
        Chunk::StoreCodes(to, x[i][j], args.kv_dtype, scale, apart);
      } else {
        Chunk::Store(to, x[i][j], apart);
      }
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_KERNEL_CUH_
