// SPDX-License-Identifier: Apache-2.0

// The decode kernel on 8-bit pages: its queries, and its products with bytes of K and V.
//
// Every product is one of f16: all codes are exact in it, and their conversions to it are the
// cheapest (expand_bytes.cuh). ldmatrix moves pairs of bytes as if they were 16-bit elements.
//   K   a lane gets 4 neighbouring dimensions of a token, where mma wants two pairs 8 apart: Q has
//       the same change of order, so the products are those of the same dimensions
//   V   transposed, a lane gets two neighbouring dimensions of two tokens; of 16 dimensions the
//   even
//       ones make one operand and the odd ones the next: O has them in this order

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_BYTES_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_BYTES_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/tensor_core.cuh"
#include "cuda/attention/traits.h"
#include "cuda/expand_bytes.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A row of Q in f16. One of bf16 is multiplied with the power of two that brings its largest
// element to 2^14 or above: what f16 then rounds is below 2^-32 of that one, by at most 2^-40 of
// it. The products are multiplied with the reciprocal.
template <typename T>
struct HalfScale {
  static constexpr bool kIsOne = std::is_same_v<T, Float16>;
  float factor = 1.0f;
  float reciprocal = 1.0f;

  // top: the row's largest magnitude. Infinite: the others do not matter beside it.
  JAX_PAGED_DEVICE explicit HalfScale(float top) {
    if constexpr (!kIsOne) {
      const uint32_t exponent = prim::BitCast<uint32_t>(top) >> 23;
      const uint32_t wanted = 127 + 127 + 14 - exponent;
      const uint32_t field = wanted < 253 ? wanted : 253;  // so that the reciprocal is normal
      factor = prim::BitCast<float>(field << 23);
      reciprocal = prim::BitCast<float>((254 - field) << 23);
    }
  }

  // Two elements in a word.
  JAX_PAGED_DEVICE static float Low(uint32_t pair) {
    return prim::ToFloat(T{static_cast<uint16_t>(pair & 0xffffu)});
  }
  JAX_PAGED_DEVICE static float High(uint32_t pair) {
    return prim::ToFloat(T{static_cast<uint16_t>(pair >> 16)});
  }
  JAX_PAGED_DEVICE static float Top(float top, uint32_t pair) {
    if constexpr (kIsOne) return top;
    top = prim::Max(top, prim::Max(Low(pair), -Low(pair)));
    return prim::Max(top, prim::Max(High(pair), -High(pair)));
  }
  JAX_PAGED_DEVICE uint32_t operator()(uint32_t pair) const {
    if constexpr (kIsOne) return pair;
    return prim::PackPair<Float16>(Low(pair) * factor, High(pair) * factor);
  }
};

// The unit's queries as the A operand of mma in f16, in registers. Of 16 dimensions lane l has
// those at 4(l%4), as K has them.
template <typename T, int HEAD_DIM, bool SHARED>
class HalfQueries {
 public:
  JAX_PAGED_DEVICE explicit HalfQueries(Shared<char>) {}
  JAX_PAGED_DEVICE void Load(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale) {
    const int32_t lane = prim::LaneIndex();
    const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
    const float k_scale = HeadScale(args.k_scale, rows.kv_head);
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = lane / 4 + 8 * half;
      const bool valid = row < rows.count && !scale.is_zero;
      const int64_t head = valid ? HeadIndex(args, segment, rows, row) : 0;
      const Global<const char> source = args.q + (head * args.head_dim + lane % 4 * 4) * 2;
      float top = 0.0f;
      JAX_PAGED_UNROLL
      for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
        Word2 x = {0, 0};
        if (valid && k * 16 < args.head_dim) {
          x = prim::LoadConst((source + k * 32).template As<const Word2>());
        }
        q_[k][half] = x.x ^ sign;
        q_[k][half + 2] = x.y ^ sign;
        top = HalfScale<T>::Top(HalfScale<T>::Top(top, x.x), x.y);
      }
      if constexpr (!HalfScale<T>::kIsOne) {
        top = prim::Max(top, prim::ShuffleXor(top, 1));
        top = prim::Max(top, prim::ShuffleXor(top, 2));
        const HalfScale<T> to_half(top);
        JAX_PAGED_UNROLL
        for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
          q_[k][half] = to_half(q_[k][half]);
          q_[k][half + 2] = to_half(q_[k][half + 2]);
        }
        factor_[half] = to_half.reciprocal * k_scale;
      } else {
        factor_[half] = k_scale;
      }
    }
  }
  JAX_PAGED_DEVICE void Operand(int32_t step, int32_t /*lane*/, uint32_t (&a)[4]) const {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) a[i] = q_[step][i];
  }
  // Of the products of the lane's row l/4 + 8 half; with it the scale of the head's K.
  JAX_PAGED_DEVICE float Factor(int32_t half, int32_t /*lane*/) const { return factor_[half]; }

 private:
  uint32_t q_[HEAD_DIM / 16][4];
  float factor_[2];
};

// The same in shared memory, for all warps. A warp fetches every fourth row, a lane 8 dimensions.
template <typename T, int HEAD_DIM>
class HalfQueries<T, HEAD_DIM, /*SHARED=*/true> {
 public:
  using Traits = DecodeTraits<HEAD_DIM, PageKind::kEightBit>;

  JAX_PAGED_DEVICE explicit HalfQueries(Shared<char> exchange)
      : tile_(exchange + sizeof(ExchangeShared)),
        factors_((tile_ + Traits::kQueryTileBytes).template As<float>()) {}

  JAX_PAGED_DEVICE void Load(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale) {
    static_assert(Traits::kRowChunks <= kWarpLanes, "a lane has one chunk of a row");
    const int32_t lane = prim::LaneIndex();
    const bool has_chunk = lane < Traits::kRowChunks;
    const float k_scale = HeadScale(args.k_scale, rows.kv_head);
    JAX_PAGED_NO_UNROLL
    for (int32_t row = prim::WarpIndex(); row < kTileRows; row += kWarps) {
      Word4 x = {0, 0, 0, 0};
      if (has_chunk) x = LoadQueries<T>(args, segment, rows, scale, row, lane);
      float top = HalfScale<T>::Top(0.0f, x.x);
      top = HalfScale<T>::Top(top, x.y);
      top = HalfScale<T>::Top(top, x.z);
      top = HalfScale<T>::Top(top, x.w);
      JAX_PAGED_UNROLL
      for (int32_t step = 1; step < kWarpLanes; step *= 2) {
        top = prim::Max(top, prim::ShuffleXor(top, step));
      }
      const HalfScale<T> to_half(top);
      if (lane == 0) prim::Store(factors_ + row, to_half.reciprocal * k_scale);
      if (!has_chunk) continue;
      const int32_t step = lane / 2;
      const int32_t within = lane % 2 * 8;
      prim::Store((tile_ + (Traits::Offset(row, 2 * step) + within)).template As<Word2>(),
                  Word2{to_half(x.x), to_half(x.z)});
      prim::Store((tile_ + (Traits::Offset(row, 2 * step + 1) + within)).template As<Word2>(),
                  Word2{to_half(x.y), to_half(x.w)});
    }
    prim::SyncThreads();  // the queries are there; FinishSegment parts their reads from the next
                          // Load
  }
  JAX_PAGED_DEVICE void Operand(int32_t step, int32_t lane, uint32_t (&a)[4]) const {
    prim::LoadMatrix(a, tile_ + Traits::Offset(lane % 16, 2 * step + lane / 16));
  }
  JAX_PAGED_DEVICE float Factor(int32_t half, int32_t lane) const {
    return prim::Load(factors_ + (lane / 4 + 8 * half));
  }

 private:
  Shared<char> tile_;
  Shared<float> factors_;
};

// 32 bytes of 16 rows: of bytes 0-15 rows 0-7 and 8-15, then the same of bytes 16-31, which are not
// there at the end of an odd number of chunks.
template <int HEAD_DIM, bool TRANSPOSED>
JAX_PAGED_DEVICE void LoadBytes(Shared<char> tile, int32_t lane, int32_t pair,
                                uint32_t (&words)[4]) {
  using Rows = ByteRows<HEAD_DIM>;
  const bool is_whole = 2 * pair + 1 < Rows::kChunks;
  const Shared<char> row = tile + Rows::PairOffset(lane % 16, pair, is_whole ? lane / 16 : 0);
  if constexpr (TRANSPOSED) {
    prim::LoadMatrixTransposed(words, row);
  } else {
    prim::LoadMatrix(words, row);
  }
}

// s += Q K^T of 16 tokens.
template <int HEAD_DIM, typename Queries>
JAX_PAGED_DEVICE void MultiplyByteKeys(Dtype dtype, Shared<char> k_tile, int32_t lane,
                                       const Queries& queries, float (&s)[2][4]) {
  constexpr int32_t kChunks = ByteRows<HEAD_DIM>::kChunks;
  WithStored(dtype, [&](auto stored) {
    JAX_PAGED_UNROLL
    for (int32_t k = 0; k < kChunks; k += 2) {
      uint32_t words[4];
      LoadBytes<HEAD_DIM, /*TRANSPOSED=*/false>(k_tile, lane, k / 2, words);
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 2 && k + i < kChunks; ++i) {
        uint32_t a[4];
        queries.Operand(k + i, lane, a);
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < 2; ++n) {
          const Pairs b = Expand<Float16>(words[2 * i + n], stored);
          prim::Mma<Float16>(s[n], a, b.low, b.high);
        }
      }
    }
  });
}

// o += P V of 16 tokens; P is the sum of TERMS operands.
template <int HEAD_DIM, int TERMS>
JAX_PAGED_DEVICE void MultiplyByteValues(Dtype dtype, Shared<char> v_tile, int32_t lane,
                                         const uint32_t (&p)[TERMS][4],
                                         float (&o)[HEAD_DIM / 8][4]) {
  constexpr int32_t kChunks = ByteRows<HEAD_DIM>::kChunks;
  WithStored(dtype, [&](auto stored) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < kChunks; n += 2) {
      uint32_t words[4];
      LoadBytes<HEAD_DIM, /*TRANSPOSED=*/true>(v_tile, lane, n / 2, words);
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 2 && n + i < kChunks; ++i) {
        const Pairs first = Expand<Float16, Alternate>(words[2 * i], stored);
        const Pairs second = Expand<Float16, Alternate>(words[2 * i + 1], stored);
        JAX_PAGED_UNROLL
        for (int32_t term = 0; term < TERMS; ++term) {
          prim::Mma<Float16>(o[2 * (n + i)], p[term], first.low, second.low);
          prim::Mma<Float16>(o[2 * (n + i) + 1], p[term], first.high, second.high);
        }
      }
    }
  });
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_BYTES_CUH_
