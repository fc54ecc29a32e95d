// SPDX-License-Identifier: Apache-2.0

// Prefill in bf16 by tiles (isa/tiles.h): what prefill.h does otherwise. Included by inst/amx.cc
// inside its target region (isa.h), after prefill.h.
//
//   keys     [16 tokens a tile][head_dim / 32][16 pairs of dimensions][16 tokens][2]
//   scores   f32, as in prefill.h
//   weights  in place of a row's scores, as words. What rounding to a word leaves is a second word,
//            unless all weights of the block are small beside the sum of the weights so far: then
//            rounding errors are many and cancel. What a row does not see has weight 0
//   values   [v_head_dim / 32][32 tokens a step][even dimensions, odd ones][16 pairs of tokens]
//            [16 dimensions][2], in the order in which o has them
//
// A weight of 0 makes 0 of any value but infinity and NaN: a block with such values is prefill.h's.

#ifndef JAX_PAGED_CPU_ATTENTION_PREFILL_TILES_H_
#define JAX_PAGED_CPU_ATTENTION_PREFILL_TILES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

static_assert(kKeyBlock == 4 * kWidth && kTileRows == kWidth, "a row of weights is four vectors");

inline void PackKeyTiles(const KeyBlock<BFloat16>& block, int64_t head_dim, float* to) {
  for (int t0 = 0; t0 < block.count; t0 += kWidth) {
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
      Vec words[kWidth];
      JAX_PAGED_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        words[i] = t0 + i < block.count ? LoadWords(block.k[t0 + i] + d, head_dim - d) : Zero();
      }
      Transpose(words);
      JAX_PAGED_UNROLL
      for (int i = 0; i < kWidth; ++i, to += kWidth) Store(to, words[i]);
    }
  }
  if (RoundUp(block.count, kWidth) % kTileDepth == 0) return;
  for (int64_t i = 0; i < RoundUp(head_dim, kTileDepth) / 2; ++i, to += kWidth) Store(to, Zero());
}

// Words of two tokens, dimension by dimension: the even dimensions of 32, and the odd ones.
JAX_PAGED_INLINE Pair PairTokens(__m512i a, __m512i b) {
  constexpr __mmask32 kOdd = 0xaaaaaaaau;
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi16(kOdd, a, _mm512_slli_epi32(b, 16))),
          _mm512_castsi512_ps(_mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(a, 16), b))};
}
// The same of fewer than 32 dimensions, which are not parted: 16, and the rest.
JAX_PAGED_INLINE Vec PairHalves(__m256i a, __m256i b) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
}

// Returns whether all values are finite.
inline bool PackValueTiles(const KeyBlock<BFloat16>& block, int64_t v_head_dim, float* to) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t d = 0; d < v_head_dim; d += kTileDepth) {
    const int64_t n = v_head_dim - d;
    float* of_step = to + d / kTileDepth * (kKeyBlock / kTileDepth) * 2 * kTileFloats;
    for (int t = 0; t < block.count; t += kTileDepth, of_step += 2 * kTileFloats) {
      float* even = of_step;
      for (int i = t; i < t + kTileDepth; i += 2, even += kWidth) {
        const Vec x = i < block.count ? LoadWords(block.v[i] + d, n) : Zero();
        const Vec y = i + 1 < block.count ? LoadWords(block.v[i + 1] + d, n) : Zero();
        const __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(a, magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(b, magnitude));
        Pair both;
        if (n >= kTileDepth) {
          both = PairTokens(a, b);
        } else {
          both.a = PairHalves(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
          both.b = PairHalves(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1));
        }
        Store(even, both.a);
        Store(even + kTileFloats, both.b);
      }
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

// scores[row][token] for the tokens that each 32 rows see.
inline void ScoreTiles(const WorkerScratch& scratch, const int* hidden, const int* visible,
                       int64_t padded_rows, int64_t head_dim) {
  const int64_t steps = CeilDiv(head_dim, kTileDepth);
  const int64_t q_bytes = scratch.q_stride * int64_t{sizeof(float)};
  constexpr int64_t kScoreBytes = kKeyBlock * int64_t{sizeof(float)};
  Written(scratch.k_panels);
  for (int t = hidden[0] / kTileDepth * kTileDepth; t < visible[padded_rows - 1]; t += kTileDepth) {
    const float* const keys = scratch.k_panels + t / kTileRows * steps * kTileFloats;
    const float* const more_keys = keys + steps * kTileFloats;
    for (int64_t r = 0; r < padded_rows; r += 2 * kTileRows) {
      const bool two = padded_rows - r > kTileRows;
      const int64_t last = r + (two ? 2 : 1) * kTileRows - 1;
      if (visible[last] <= t || hidden[r] >= t + kTileDepth) continue;
      const float* const q = scratch.q + r * scratch.q_stride;
      float* const to = scratch.scores + r * kKeyBlock + t;
      ZeroSums(two, true);
      for (int64_t i = 0; i < steps; ++i) {
        const int64_t at = i * kTileFloats;
        AddTileProducts(two, true, q + i * kWidth, q_bytes, keys + at, more_keys + at);
      }
      StoreSums(two, true, to, kScoreBytes);
    }
  }
  Written(scratch.scores);
}

// The logits of a row that it sees, 16 from number 16 i on; others are -inf.
JAX_PAGED_INLINE __mmask16 PartOf(uint64_t seen, int i) {
  return static_cast<__mmask16>(seen >> i * kWidth);
}
JAX_PAGED_INLINE Vec SeenLogits(const float* scores, uint64_t seen, int i) {
  return _mm512_mask_loadu_ps(Set1(-kInfinity), PartOf(seen, i), scores + i * kWidth);
}

// What 16 rows subtract from their exponents, and what their o is to be scaled by.
struct TileShift {
  float shift[kTileRows];
  float alpha[kTileRows];
};

// The largest logits of 16 rows: of top and m so far become those with the block, and l is scaled.
// Returns whether one word for each weight would not do.
inline bool StartWeights(const float* scores, const uint64_t* seen, float scale, float* top,
                         float* m, float* l, TileShift* to) {
  Vec largest[kTileRows];
  __mmask16 sees = 0;
  for (int r = 0; r < kTileRows; ++r, scores += kKeyBlock) {
    largest[r] = SeenLogits(scores, seen[r], 0);
    JAX_PAGED_UNROLL
    for (int i = 1; i < kKeyBlock / kWidth; ++i) {
      largest[r] = MaxSkipNan(largest[r], SeenLogits(scores, seen[r], i));
    }
    sees = static_cast<__mmask16>(sees | (seen[r] != 0) << r);
  }
  Transpose(largest);
  Vec block_top = Set1(-kInfinity);
  JAX_PAGED_UNROLL
  for (int i = 0; i < kTileRows; ++i) block_top = MaxSkipNan(block_top, largest[i]);
  const Vec lowest = Set1(-kInfinity), factor = Set1(scale);
  const Vec new_top = MaxSkipNan(Load(top), block_top), old_m = Load(m);
  const __mmask16 any = _mm512_cmp_ps_mask(new_top, lowest, _CMP_NEQ_UQ);
  const Vec new_m = _mm512_mask_mul_ps(lowest, any, new_top, factor);
  const __mmask16 same = _mm512_cmp_ps_mask(old_m, new_m, _CMP_EQ_OQ);
  const Vec alpha = _mm512_mask_mov_ps(Exp2(_mm512_sub_ps(old_m, new_m)), same, Set1(1.0f));
  const Vec new_l = Mul(Load(l), alpha);
  // 2^enough is at most the part of l (decode_words.h).
  const Vec enough = _mm512_getexp_ps(Mul(new_l, Set1(kOneWordPart)));
  const Vec exponent = _mm512_sub_ps(Mul(block_top, factor), new_m);
  const __mmask16 needs = _mm512_cmp_ps_mask(exponent, enough, _CMP_NLE_UQ);
  Store(top, new_top);
  Store(m, new_m);
  Store(l, new_l);
  Store(to->shift, _mm512_maskz_sub_ps(any, Zero(), new_m));
  Store(to->alpha, alpha);
  return (needs & sees) != 0;
}

// The logits of 16 rows become weights, words of what they see of the block and zeros else, and
// with REST what rounding left of them kKeyBlock words behind. l += their sums.
template <bool REST>
void WeighTileRows(float* scores, const uint64_t* seen, float scale, const float* shift, float* l) {
  Vec sum[kTileRows];
  for (int r = 0; r < kTileRows; ++r, scores += kKeyBlock) {
    constexpr int kVecs = kKeyBlock / kWidth;
    Vec weight[kVecs];
    JAX_PAGED_UNROLL
    for (int i = 0; i < kVecs; ++i) {
      const Vec exponent = FmaOnce(SeenLogits(scores, seen[r], i), Set1(scale), Set1(shift[r]));
      weight[i] = _mm512_maskz_mov_ps(PartOf(seen[r], i), Exp2(exponent));
    }
    BFloat16* const words = reinterpret_cast<BFloat16*>(scores);
    JAX_PAGED_UNROLL
    for (int i = 0; i < kVecs; i += 2) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight[i + 1], weight[i]);
      _mm512_storeu_si512(words + i * kWidth, both);
      if constexpr (REST) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
        const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
        const Vec a = _mm512_sub_ps(weight[i], _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
        const Vec b =
            _mm512_sub_ps(weight[i + 1], _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
        _mm512_storeu_si512(words + kKeyBlock + i * kWidth, (__m512i)_mm512_cvtne2ps_pbh(b, a));
      }
    }
    sum[r] = Add(Add(weight[0], weight[1]), Add(weight[2], weight[3]));
  }
  Store(l, Add(Load(l), SumEach(sum)));
}

// o = o * alpha + weights v of 32 rows, or of 16, and of tokens [begin, end).
inline void AddValueTiles(const WorkerScratch& scratch, const Partial& part, int64_t r, bool two,
                          int begin, int end, bool with_rest, int64_t v_head_dim) {
  constexpr int64_t kScoreBytes = kKeyBlock * int64_t{sizeof(float)};
  const int64_t o_bytes = part.stride * int64_t{sizeof(float)};
  const float* const weights = scratch.scores + r * kKeyBlock;
  for (int64_t d = 0; d < v_head_dim; d += kTileDepth) {
    float* const o = part.o + r * part.stride + d;
    LoadSums(two, true, o, o_bytes);
    for (int t = begin; t < end; t += kTileDepth) {
      const int64_t step = d / kTileDepth * (kKeyBlock / kTileDepth) + t / kTileDepth;
      const float* const values = scratch.v_panels + step * 2 * kTileFloats;
      for (int rest = 0; rest < (with_rest ? 2 : 1); ++rest) {
        AddTileProducts(two, true, weights + (rest * kKeyBlock + t) / 2, kScoreBytes, values,
                        values + kTileFloats);
      }
    }
    StoreSums(two, true, o, o_bytes);
  }
  Written(part.o);
}

// Shapes the tiles while it lives.
template <>
struct BlockTiles<BFloat16> {
  static constexpr int kRows = kTileRows;

  BlockTiles() { ShapeTiles(kTileRows, kTileRows); }
  ~BlockTiles() { _tile_release(); }

  void Score(const KeyBlock<BFloat16>& block, const WorkerScratch& scratch, const int* hidden,
             const int* visible, int64_t padded_rows, int64_t head_dim) const {
    PackKeyTiles(block, head_dim, scratch.k_panels);
    ScoreTiles(scratch, hidden, visible, padded_rows, head_dim);
  }

  // Scores become weights, times V: done, unless a value is not finite. `seen` (SetSeen) is null
  // where rows see ranges.
  bool AddValues(const KeyBlock<BFloat16>& block, const WorkerScratch& scratch, const Partial& part,
                 const int* hidden, const int* visible, const uint64_t* seen, float scale,
                 float* top, int64_t padded_rows, int64_t v_head_dim) const {
    if (!PackValueTiles(block, v_head_dim, scratch.v_panels)) return false;
    for (int64_t r = 0; r < padded_rows; r += 2 * kTileRows) {
      const bool two = padded_rows - r > kTileRows;
      const int64_t end = r + (two ? 2 : 1) * kTileRows;
      if (visible[end - 1] <= hidden[r]) continue;
      const int64_t rows = end - r;
      uint64_t mine[2 * kTileRows];
      for (int64_t i = 0; i < rows; ++i) {
        mine[i] = BitRange(hidden[r + i], visible[r + i]) & (seen ? seen[r + i] : ~uint64_t{0});
      }
      TileShift shifts[2];
      bool needs_rest = false;
      for (int64_t i = 0; i < rows; i += kTileRows) {
        needs_rest |=
            StartWeights(scratch.scores + (r + i) * kKeyBlock, mine + i, scale, top + r + i,
                         part.m + r + i, part.l + r + i, &shifts[i / kTileRows]);
      }
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const auto weigh = needs_rest ? WeighTileRows<true> : WeighTileRows<false>;
        weigh(scratch.scores + (r + i) * kKeyBlock, mine + i, scale, shifts[i / kTileRows].shift,
              part.l + r + i);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float alpha = shifts[i / kTileRows].alpha[i % kTileRows];
        if (alpha == 1.0f) continue;
        float* const o = part.o + (r + i) * part.stride;
        for (int64_t d = 0; d < v_head_dim; d += kWidth) {
          Store(o + d, Mul(Load(o + d), Set1(alpha)));
        }
      }
      Written(scratch.scores);
      const int begin = hidden[r] / kTileDepth * kTileDepth;
      AddValueTiles(scratch, part, r, two, begin, visible[end - 1], needs_rest, v_head_dim);
    }
    return true;
  }
};

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_PREFILL_TILES_H_
