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

#include "cuda/prim.h"
#include "cuda/qkv_norm_rope_write/args.h"
#include "cuda/written_tokens.cuh"

namespace jax_paged::cuda {

inline constexpr int32_t kQkvWarps = kQkvThreads / kWarpLanes;
inline constexpr int32_t kQkvSharedBytes = kQkvWarps * 4;

// VEC elements of T, read and written at once.
template <typename T, int VEC>
struct QkvChunk {
  static constexpr int32_t kBytes = VEC * static_cast<int32_t>(sizeof(T));
  using Word =
      std::conditional_t<kBytes == 16, Word4, std::conditional_t<kBytes == 8, Word2, uint32_t>>;
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

  JAX_PAGED_DEVICE static void Store(Global<char> to, const float (&x)[VEC]) {
    Words out;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out.word[i] = prim::BitCast<uint32_t>(x[i]);
      } else {
        out.word[i] = prim::PackPair<T>(x[2 * i], x[2 * i + 1]);
      }
    }
    prim::Store(to.As<Word>(), prim::BitCast<Word>(out));
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
    writes = has_position && args.k_slots.IsSlot(layer, slot) &&
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

  if (!is_head || !(is_q || writes)) return;
  Global<char> target;
  if (is_q) {
    const int64_t q_row = int64_t{token} * args.num_q_heads + head;
    target = args.q + q_row * args.head_dim * static_cast<int64_t>(sizeof(T));
  } else if (is_v) {
    target = args.v_pages + args.v_slots.Offset(layer, slot, head - first_v);
  } else {
    target = args.k_pages + args.k_slots.Offset(layer, slot, head - first_k);
  }
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
      Chunk::Store(target + int64_t{chunk[j]} * Chunk::kBytes, x[i][j]);
    }
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_QKV_NORM_ROPE_WRITE_KERNEL_CUH_
