// SPDX-License-Identifier: Apache-2.0

// Logits that are more than a product times sm_scale: soft cap and ALiBi; and which keys a query
// sees: ranges, and in token trees single ones. Included by inst/<isa>.cc inside its target
// region (isa.h), after common.h.
//
// Such a call edits the products in place between "scores" and "weights", to logits in natural
// units; a plain call pays one branch per block for it, and one for trees.

#ifndef JAX_PAGED_CPU_ATTENTION_LOGITS_H_
#define JAX_PAGED_CPU_ATTENTION_LOGITS_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// What the kernels multiply products s = q.k with. The sign of sm_scale goes into the queries.
struct LogitScale {
  float sign;
  float scale;     // s, or the edited logit, times it is in units of log2
  float factor;    // edited logits: s times it is the logit before the soft cap
  float soft_cap;  // of edited logits; 0: none
  bool alibi;      // edited logits fall with the distance
  bool edited;     // LogitOptions::edits

  explicit LogitScale(const AttentionParams& params) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kSmallest = 1.17549435e-38f;
    sign = params.sm_scale < 0.0f ? -1.0f : 1.0f;
    factor = params.sm_scale * sign;
    scale = params.sm_scale * kLog2E * sign;
    if (scale < kSmallest) {  // all finite logits are 0; a masked one must stay -inf, not -inf * 0
      sign = 0.0f;
      scale = factor = 1.0f;
    }
    soft_cap = params.logits.soft_cap;
    alibi = params.logits.alibi_slopes != nullptr;
    edited = params.logits.edits();
    if (edited) scale = kLog2E;
  }
};

// x P(x^2) / Q(x^2) for |x| <= 9, beyond it +-1: a least-maximum fit with relative error 3e-8
// before rounding. NaN stays NaN.
JAX_PAGED_INLINE Vec Tanh(Vec x) {
  constexpr float kP[5] = {1.0f, 0.13379714f, 0.0034940301f, 2.0583408e-5f, 1.3318973e-8f};
  constexpr float kQ[5] = {1.0f, 0.46713030f, 0.025871055f, 0.00032830855f, 7.761978e-7f};
  x = MinKeepNan(Set1(9.0f), MaxSkipNan(x, Set1(-9.0f)));
  const Vec y = Mul(x, x);
  Vec p = Set1(kP[4]), q = Set1(kQ[4]);
  JAX_PAGED_UNROLL
  for (int i = 3; i >= 0; --i) {
    p = Fma(p, y, Set1(kP[i]));
    q = Fma(q, y, Set1(kQ[i]));
  }
  return Ratio(Mul(x, p), q);
}

// Products s as logits without ALiBi: soft_cap tanh(s factor / soft_cap), or s factor.
JAX_PAGED_INLINE Vec CappedLogit(Vec s, const LogitScale& scale) {
  const float factor = scale.factor, cap = scale.soft_cap;
  if (!(cap > 0.0f)) return Mul(s, Set1(factor));
  return Mul(Set1(cap), Tanh(Mul(s, Set1(factor / cap))));
}

// offset[i] = position of listed token i, less block.begin; repeats the last one.
template <typename T>
void ListOffsets(const AttentionParams& params, const Row& row, int32_t row_index,
                 const KeyBlock<T>& block, float* offset) {
  int listed = 0;
  for (int i = 0; i < kKeyBlock; ++i) {
    if (block.count_before[i + 1] <= listed) continue;
    const int64_t position = PositionOf(params, row, row_index, block.begin + i);
    offset[listed++] = static_cast<float>(position - block.begin);
  }
  for (int i = listed; i < kKeyBlock; ++i) offset[i] = listed ? offset[listed - 1] : 0.0f;
}

// What ALiBi needs to know of a packed row, whose logits it gives slope (key - query).
struct AlibiRow {
  float slope;
  int64_t position;  // of its query, as if the split's tokens stood where they are stored
};

// Of a split's tokens, packed row r of an item sees [first[r], limit[r]). Rows from num_rows to
// padded are like the last one. `alibi` may be null. Out of line, as is CountBefore: once for all
// dtypes.
__attribute__((noinline)) inline void SetRows(const AttentionParams& params, const Row& row,
                                              const WorkItem& item, const KeySpan& span,
                                              int num_rows, int padded, int64_t* first,
                                              int64_t* limit, AlibiRow* alibi) {
  const int64_t offset = span.pinned ? 0 : row.slot_offset;
  for (int r = 0; r < padded; ++r) {
    const int64_t packed = item.packed_begin + (r < num_rows ? r : num_rows - 1);
    const int64_t query = packed / params.group_size;
    first[r] = span.pinned ? 0 : FirstKey(row, query);
    limit[r] = VisibleKeys(row, query, params.causal);
    // Queries beyond the tables of rope are no one's (WriteOutput); later keys only they see.
    if (params.rope.cos && !params.causal) {
      limit[r] = Clamp(params.rope.max_positions - offset, 0, limit[r]);
    }
    if (!alibi) continue;
    const int64_t head = int64_t{item.kv_head} * params.group_size + packed % params.group_size;
    alibi[r] = {params.logits.alibi_slopes[head],
                TokenAt(params, row, item.row, QueryPosition(row, query)) - offset};
  }
}

// counts[r] = how many of a block's listed tokens lie before token limits[r] of the row; see
// KeyBlock.
__attribute__((noinline)) inline void CountBefore(const uint8_t* count_before, int64_t begin,
                                                  const int64_t* limits, int rows, int* counts) {
  for (int r = 0; r < rows; ++r) {
    counts[r] = count_before[Clamp(limits[r] - begin, 0, kKeyBlock)];
  }
}

// The lowest n bits of a word, 0 <= n <= 64.
JAX_PAGED_INLINE uint64_t LowBits(int n) { return n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}; }

// Bits [begin, end) of a word.
JAX_PAGED_INLINE uint64_t BitRange(int begin, int end) {
  return begin < end ? LowBits(end) & ~LowBits(begin) : 0;
}

// Takes the lowest run of ones out of *bits, which is not 0: [*begin, *end).
inline void TakeRun(uint64_t* bits, int* begin, int* end) {
  *begin = __builtin_ctzll(*bits);
  const uint64_t behind = ~(*bits >> *begin);
  *end = behind ? *begin + __builtin_ctzll(behind) : 64;
  *bits &= ~BitRange(*begin, *end);
}

// The end of the run of bits that `rows` words all have, from `begin` on and up to `end`.
inline int CommonRun(const uint64_t* seen, int rows, int begin, int end) {
  uint64_t missing = 0;
  for (int r = 0; r < rows; ++r) missing |= ~seen[r];
  missing &= BitRange(begin, end);
  return missing ? __builtin_ctzll(missing) : end;
}

// Whether a query of the row may see fewer keys than its range in a block of a split that ends at
// `end`: it reaches into the tree, or the window is a matter of depth.
inline bool HidesKeys(const Row& row, const KeySpan& span, int64_t end) {
  const bool windowed = row.window > 0 && !span.pinned;
  return row.tree_size > 0 && (windowed || end > int64_t{row.seq_len} - row.tree_size);
}

// seen[r]: the listed tokens of a block (see KeyBlock) that packed row r of an item sees, a bit for
// each; for a row with a tree. Rows from num_rows to padded are like the last one.
__attribute__((noinline)) inline void SetSeen(const AttentionParams& params, const Row& row,
                                              const WorkItem& item, const KeySpan& span,
                                              int num_rows, int padded, const uint8_t* count_before,
                                              int64_t begin, uint64_t* seen) {
  const bool windowed = row.window > 0 && !span.pinned;
  const TreeView tree = TreeOf(params, item.row);
  const int64_t root = int64_t{row.seq_len} - row.tree_size;
  for (int r = 0; r < padded; ++r) {
    const int64_t packed = item.packed_begin + r;
    if (r > 0 && (r >= num_rows || packed % params.group_size != 0)) {  // the same query
      seen[r] = seen[r - 1];
      continue;
    }
    const int64_t stored = QueryPosition(row, packed / params.group_size);
    int64_t first = 0;  // position of the first key in the window
    if (windowed) first = PositionOf(params, row, item.row, stored) - row.window + 1;
    uint64_t bits = 0;
    for (int i = 0; i < kKeyBlock; ++i) {
      if (count_before[i + 1] == count_before[i]) continue;
      const int64_t token = begin + i;
      if (token > stored) continue;
      if (windowed && PositionOf(params, row, item.row, token) < first) continue;
      if (token >= root && !tree.Sees(stored - root, token - root)) continue;
      bits |= uint64_t{1} << count_before[i];
    }
    seen[r] = bits;
  }
}

// Makes the logits of hidden tokens -inf; scores[token * token_stride] for tokens [begin, end).
inline void HideScores(uint64_t seen, int begin, int end, int64_t token_stride, float* scores) {
  for (uint64_t bits = BitRange(begin, end) & ~seen; bits; bits &= bits - 1) {
    scores[__builtin_ctzll(bits) * token_stride] = -kInfinity;
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_LOGITS_H_
