// SPDX-License-Identifier: Apache-2.0

// Prefill: a block of up to 192 packed rows against K and V in key blocks of 64 tokens, as two
// small matrix products in registers.
//
//   pack     K of the key block transposed to panels [64 / panel][depth][panel], V to panels
//            [v_head_dim / panel][64][panel]; a panel is two vectors wide
//   scores   tiles of kGemmRows rows x one panel: s = q k^T, panel by panel so that it stays in L1
//   edit     soft cap, ALiBi: on the scores, where the call has them
//   weights  per row: running maximum, 2^(s * scale - m)
//   values   the same tiles: o = o * alpha + weights v
//
// A row tile uses the keys that one of its rows sees and no more, so tiles above the diagonal, or
// left of a window, cost nothing. Bound by FMA: 2 loads of the panel and kGemmRows broadcasts feed
// 2 kGemmRows FMAs.

#ifndef JAX_PAGED_CPU_ATTENTION_PREFILL_H_
#define JAX_PAGED_CPU_ATTENTION_PREFILL_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int kPanel = 2 * kWidth;
static_assert(kPadFloats % kPanel == 0 && kKeyBlock % kPanel == 0, "buffers hold whole panels");

// Products of blocks by tiles of the processor; prefill_tiles.h has those that there are.
template <typename T>
struct BlockTiles {
  static constexpr int kRows = 0;  // none
};
template <typename T>
constexpr bool kUsesTiles = BlockTiles<T>::kRows > 0;

// Rows of a tile.
template <typename T>
constexpr int kPrefillRows = kUsesTiles<T> ? BlockTiles<T>::kRows : kGemmRows;
static_assert(kPrefillBlock % kGemmRows == 0 && kPrefillBlock % 16 == 0,
              "buffers hold whole row tiles");

// Stores kWidth dimensions of kWidth tokens, transposed, `rows` dimensions of them.
JAX_PAGED_INLINE void StoreTransposed(Vec* x, int64_t rows, float* to) {
  Transpose(x);
  for (int64_t i = 0; i < rows; ++i) Store(to + i * kPanel, x[i]);
}

// Floats along head_dim of queries and packed keys.
template <typename T>
constexpr int64_t KeyDepth(int64_t head_dim) {
  return kUsesDot<T> ? head_dim / 2 : head_dim;
}

// k_panels[panel][float along head_dim][token of the panel], zeros past the block's tokens.
template <typename T>
void PackKeys(const KeyBlock<T>& block, int64_t head_dim, float* panels) {
  const int64_t depth = KeyDepth<T>(head_dim);
  for (int t0 = 0; t0 < block.count; t0 += kWidth) {
    float* to = panels + (t0 / kPanel) * depth * kPanel + t0 % kPanel;
    const int tokens = block.count - t0 < kWidth ? block.count - t0 : kWidth;
    int64_t d = 0;
    if constexpr (kUsesDot<T>) {
      for (; d < head_dim; d += 2 * kWidth) {
        Vec a[kWidth];
        JAX_PAGED_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          a[i] = i < tokens ? LoadWords(block.k[t0 + i] + d, head_dim - d) : Zero();
        }
        StoreTransposed(a, Clamp((head_dim - d) / 2, 0, kWidth), to + d / 2 * kPanel);
      }
      continue;
    }
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
      Vec a[kWidth], b[kWidth];
      JAX_PAGED_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const Pair x = i < tokens ? LoadPair(block.k[t0 + i] + d) : Pair{Zero(), Zero()};
        a[i] = x.a;
        b[i] = x.b;
      }
      StoreTransposed(a, kWidth, to + d * kPanel);
      StoreTransposed(b, kWidth, to + (d + kWidth) * kPanel);
    }
    for (; d < head_dim; d += kWidth) {
      Vec a[kWidth];
      JAX_PAGED_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        a[i] = i < tokens ? LoadTail(block.k[t0 + i] + d, head_dim - d) : Zero();
      }
      StoreTransposed(a, Clamp(head_dim - d, 0, kWidth), to + d * kPanel);
    }
  }
  if (RoundUp(block.count, kWidth) % kPanel != 0) {  // the second vector of the last panel
    float* to = panels + (block.count / kPanel) * depth * kPanel + kWidth;
    for (int64_t d = 0; d < depth; ++d) Store(to + d * kPanel, Zero());
  }
}

// v_panels[panel][token][dimension of the panel], zeros past v_head_dim.
template <typename T>
void PackValues(const KeyBlock<T>& block, int64_t v_head_dim, float* panels) {
  for (int t = 0; t < block.count; ++t) {
    const T* v = block.v[t];
    float* to = panels + t * kPanel;
    int64_t d = 0;
    for (; d + kPanel <= v_head_dim; d += kPanel) {
      const Pair x = LoadPair(v + d);
      Store(to + d * kKeyBlock, x.a);
      Store(to + d * kKeyBlock + kWidth, x.b);
    }
    if (d < v_head_dim) {
      const bool two = d + kWidth < v_head_dim;
      Store(to + d * kKeyBlock, LoadTail(v + d, v_head_dim - d));
      Store(to + d * kKeyBlock + kWidth,
            two ? LoadTail(v + d + kWidth, v_head_dim - d - kWidth) : Zero());
    }
  }
}

// sum[r][...] = sum over i in [0, depth) of a[r][i] * panel[i][...], multiplied as the logits of T
// are.
template <typename T, int ROWS>
JAX_PAGED_INLINE void MultiplyTile(const float* a, int64_t a_stride, const float* panel,
                                   int64_t depth, Vec* sum) {
  JAX_PAGED_UNROLL
  for (int i = 0; i < 2 * ROWS; ++i) sum[i] = Zero();
  for (int64_t i = 0; i < depth; ++i) {
    const Vec b0 = Load(panel + i * kPanel), b1 = Load(panel + i * kPanel + kWidth);
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Vec x = Set1(a[r * a_stride + i]);
      sum[2 * r] = MultiplyAdd<T>(x, b0, sum[2 * r]);
      sum[2 * r + 1] = MultiplyAdd<T>(x, b1, sum[2 * r + 1]);
    }
  }
}

// o[r][...] = o[r][...] * alpha[r] + sum.
template <int ROWS>
JAX_PAGED_INLINE void AddTile(const Vec* sum, const float* alpha, float* o, int64_t o_stride) {
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Vec keep = Set1(alpha[r]);
    float* p = o + r * o_stride;
    Store(p, Fma(Load(p), keep, sum[2 * r]));
    Store(p + kWidth, Fma(Load(p + kWidth), keep, sum[2 * r + 1]));
  }
}

// scores[row][token] for the tokens that each row tile sees.
template <typename T>
void ScoreRows(const WorkerScratch& scratch, const int* hidden, const int* visible,
               int64_t padded_rows, int64_t head_dim) {
  const int64_t depth = KeyDepth<T>(head_dim);
  for (int t = hidden[0] / kPanel * kPanel; t < visible[padded_rows - 1]; t += kPanel) {
    const float* panel = scratch.k_panels + t * depth;
    for (int64_t r = 0; r < padded_rows; r += kGemmRows) {
      if (visible[r + kGemmRows - 1] <= t || hidden[r] >= t + kPanel) continue;
      Vec sum[2 * kGemmRows];
      MultiplyTile<T, kGemmRows>(scratch.q + r * scratch.q_stride, scratch.q_stride, panel, depth,
                                 sum);
      float* to = scratch.scores + r * kKeyBlock + t;
      JAX_PAGED_UNROLL
      for (int i = 0; i < kGemmRows; ++i) {
        Store(to + i * kKeyBlock, sum[2 * i]);
        Store(to + i * kKeyBlock + kWidth, sum[2 * i + 1]);
      }
    }
  }
}

// Turns products [hidden, visible) of a row into logits, and perhaps some before them, in a block
// that begins at `token`. `alibi` may be null.
__attribute__((noinline)) inline void EditRow(float* scores, int hidden, int visible,
                                              const LogitScale& scale, const AlibiRow* alibi,
                                              int64_t token, const float* key_offset) {
  const Vec slope = Set1(alibi ? alibi->slope : 0.0f);
  const Vec first = Set1(alibi ? static_cast<float>(token - alibi->position) : 0.0f);
  for (int t = hidden / kWidth * kWidth; t < visible; t += kWidth) {
    Vec x = CappedLogit(Load(scores + t), scale);
    if (alibi) x = FmaOnce(slope, Add(first, Load(key_offset + t)), x);
    Store(scores + t, x);
  }
}

// Turns logits [hidden, visible) of a row into weights. Returns what o is to be scaled by.
inline float WeighRow(float* scores, int hidden, int visible, float scale, float* row_top, float* m,
                      float* l) {
  if (visible <= hidden) return 1.0f;
  const int start = hidden / kWidth * kWidth;
  const int whole = visible / kWidth * kWidth;
  for (int t = start; t < hidden; ++t) scores[t] = -kInfinity;
  Vec top = Set1(-kInfinity);
  for (int t = start; t < whole; t += kWidth) top = MaxSkipNan(top, Load(scores + t));
  if (whole < visible) {
    const Vec last = KeepFirst(Load(scores + whole), visible - whole, -kInfinity);
    Store(scores + whole, last);
    top = MaxSkipNan(top, last);
  }
  const float block_top = HorizontalMax(top);
  *row_top = block_top > *row_top ? block_top : *row_top;
  const float new_m = *row_top == -kInfinity ? -kInfinity : *row_top * scale;
  const Vec shift = Set1(new_m == -kInfinity ? 0.0f : -new_m);
  const Vec factor = Set1(scale);
  Vec sum = Zero();
  for (int t = start; t < visible; t += kWidth) {
    const Vec weight = Exp2(FmaOnce(Load(scores + t), factor, shift));
    Store(scores + t, weight);
    sum = Add(sum, weight);
  }
  const float alpha = *m == new_m ? 1.0f : (*m == -kInfinity ? 0.0f : Exp2(*m - new_m));
  *m = new_m;
  *l = *l * alpha + HorizontalSum(sum);
  return alpha;
}

// o = o + weights v of one row and one panel, for tokens [begin, end).
inline void AddValueRow(const float* weights, const float* panel, int begin, int end, float* o) {
  constexpr float kOne = 1.0f;
  Vec sum[2];
  MultiplyTile<float, 1>(weights + begin, kKeyBlock, panel + begin * kPanel, end - begin, sum);
  AddTile<1>(sum, &kOne, o, /*o_stride=*/0);
}

// o = o * alpha + weights v. `seen` (SetSeen) is null where rows see ranges.
inline void AddValueRows(const WorkerScratch& scratch, const Partial& part, const int* hidden,
                         const int* visible, const uint64_t* seen, const float* alpha,
                         int64_t padded_rows, int64_t v_head_dim) {
  for (int64_t d = 0; d < v_head_dim; d += kPanel) {
    const float* panel = scratch.v_panels + d * kKeyBlock;
    for (int64_t r = 0; r < padded_rows; r += kGemmRows) {
      // All rows of the tile see tokens [all, end); some see more.
      const int most = visible[r + kGemmRows - 1];
      if (most <= hidden[r]) continue;
      const int all = hidden[r + kGemmRows - 1];
      int end = visible[r] > all ? visible[r] : all;
      if (seen) end = CommonRun(seen + r, kGemmRows, all, end);
      const float* weights = scratch.scores + r * kKeyBlock;
      float* o = part.o + r * part.stride + d;
      Vec sum[2 * kGemmRows];
      MultiplyTile<float, kGemmRows>(weights + all, kKeyBlock, panel + all * kPanel, end - all,
                                     sum);
      AddTile<kGemmRows>(sum, alpha + r, o, part.stride);
      if (hidden[r] == all && end == most) continue;
      // A masked value must not be touched, not even with weight 0: keys that only some rows see
      // are added row by row.
      for (int i = 0; i < kGemmRows; ++i) {
        uint64_t bits = BitRange(hidden[r + i], visible[r + i]) & ~BitRange(all, end);
        if (seen) bits &= seen[r + i];
        while (bits) {
          int first, limit;
          TakeRun(&bits, &first, &limit);
          AddValueRow(weights + i * kKeyBlock, panel, first, limit, o + i * part.stride);
        }
      }
    }
  }
}

// The KV tokens of a split, into part.
template <typename T>
void PrefillSplit(const AttentionParams& params, const Row& row, const WorkItem& item,
                  const LogitScale& scale, const KeySpan& span, const WorkerScratch& scratch,
                  const Partial& part) {
  const int64_t begin = span.begin, end = span.end;
  const int num_rows = static_cast<int>(item.packed_end - item.packed_begin);
  const int padded_rows = static_cast<int>(RoundUp(num_rows, kPrefillRows<T>));
  // Tokens [first, limit) are seen; padding rows see what the last row sees.
  int64_t first[kPrefillBlock], limit[kPrefillBlock];
  AlibiRow alibi[kPrefillBlock];
  float top[kPrefillBlock];
  SetRows(params, row, item, span, num_rows, padded_rows, first, limit,
          scale.alibi ? alibi : nullptr);
  for (int r = 0; r < padded_rows; ++r) top[r] = -kInfinity;
  [[maybe_unused]] const BlockTiles<T> tiles;
  KeyBlock<T> stored, floats;
  int hidden[kPrefillBlock], visible[kPrefillBlock];
  float alpha[kPrefillBlock], key_offset[kKeyBlock];
  uint64_t seen[kPrefillBlock];
  for (int64_t token = begin; token < end; token += kKeyBlock) {
    const int64_t block_end = Clamp(token + kKeyBlock, token, end);
    GatherKeys(params, item.row, item.kv_head, token, block_end, scratch, /*part=*/0, &stored);
    const KeyBlock<T>& block = IsStaged(params) ? floats : stored;
    if constexpr (kSameType<T, float>) {
      if (&block == &floats) {
        StageKeys(params, row, item, span, stored, stored, block_end, scratch, &floats);
      }
    }
    CountBefore(block.count_before, block.begin, first, padded_rows, hidden);
    CountBefore(block.count_before, block.begin, limit, padded_rows, visible);
    if (visible[padded_rows - 1] <= hidden[0]) continue;
    if constexpr (kUsesTiles<T>) {
      tiles.Score(block, scratch, hidden, visible, padded_rows, params.head_dim);
    } else {
      PackKeys(block, params.head_dim, scratch.k_panels);
      ScoreRows<T>(scratch, hidden, visible, padded_rows, params.head_dim);
    }
    if (scale.edited) {
      if (scale.alibi) ListOffsets(params, row, item.row, block, key_offset);
      for (int r = 0; r < num_rows; ++r) {
        EditRow(scratch.scores + r * kKeyBlock, hidden[r], visible[r], scale,
                scale.alibi ? &alibi[r] : nullptr, token, key_offset);
      }
    }
    const bool hides = HidesKeys(row, span, block_end);
    if (hides) {
      SetSeen(params, row, item, span, num_rows, padded_rows, block.count_before, block.begin,
              seen);
    }
    if constexpr (kUsesTiles<T>) {
      if (tiles.AddValues(block, scratch, part, hidden, visible, hides ? seen : nullptr,
                          scale.scale, top, padded_rows, params.v_head_dim)) {
        continue;
      }
    }
    if (hides) {
      for (int r = 0; r < padded_rows; ++r) {
        HideScores(seen[r], hidden[r], visible[r], /*token_stride=*/1,
                   scratch.scores + r * kKeyBlock);
      }
    }
    for (int64_t r = 0; r < padded_rows; ++r) {
      alpha[r] = WeighRow(scratch.scores + r * kKeyBlock, hidden[r], visible[r], scale.scale,
                          &top[r], &part.m[r], &part.l[r]);
    }
    PackValues(block, params.v_head_dim, scratch.v_panels);
    AddValueRows(scratch, part, hidden, visible, hides ? seen : nullptr, alpha, padded_rows,
                 params.v_head_dim);
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_PREFILL_H_
