// Logits that are more than a product times sm_scale: soft cap and ALiBi. Included by
// attention_<isa>.cc inside its target region (isa.h), after kernel_common.h.
//
// Such a call edits the products in place between "scores" and "weights", to logits in natural
// units; a plain call pays one branch per block for it.

#ifndef JAX_PAGED_CPU_KERNEL_LOGITS_H_
#define JAX_PAGED_CPU_KERNEL_LOGITS_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// What the kernels multiply products s = q.k with. The sign of sm_scale goes into the queries.
struct LogitScale {
  float sign;
  float scale;   // s, or the edited logit, times it is in units of log2
  float factor;  // edited logits: s times it is the logit before the soft cap
  bool edited;   // there is a soft cap or ALiBi

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
    edited = params.soft_cap > 0.0f || params.alibi_slopes;
    if (edited) scale = kLog2E;
  }
};

// x P(x^2) / Q(x^2) for |x| <= 9, beyond it +-1: a least-maximum fit with relative error 3e-8
// before rounding. NaN stays NaN.
JAX_PAGED_INLINE Vec Tanh(Vec x) {
  constexpr float kP[5] = {1.0f, 0.13379714f, 0.0034940301f, 2.0583408e-5f, 1.3318973e-8f};
  constexpr float kQ[5] = {1.0f, 0.46713030f, 0.025871055f, 0.00032830855f, 7.761978e-7f};
  const Vec minus = Set1(-1.0f), low = Set1(-9.0f);
  x = Mul(minus, MaxSkipNan(Mul(minus, MaxSkipNan(x, low)), low));
  const Vec y = Mul(x, x);
  Vec p = Set1(kP[4]), q = Set1(kQ[4]);
  JAX_PAGED_UNROLL
  for (int i = 3; i >= 0; --i) {
    p = Fma(p, y, Set1(kP[i]));
    q = Fma(q, y, Set1(kQ[i]));
  }
  return Div(Mul(x, p), q);
}

// The logit of products s: soft_cap tanh(s factor / soft_cap) + slope (key - query).
JAX_PAGED_INLINE Vec EditedLogit(Vec s, float factor, float soft_cap, Vec slope, Vec distance) {
  Vec x = Mul(s, Set1(factor));
  if (soft_cap > 0.0f) x = Mul(Set1(soft_cap), Tanh(Mul(x, Set1(1.0f / soft_cap))));
  return Fma(slope, distance, x);
}

// offset[i] = position of listed token i, less block.begin; repeats the last one.
template <typename T>
void ListOffsets(const KeyBlock<T>& block, float* offset) {
  int listed = 0;
  for (int i = 0; i < kKeyBlock; ++i) {
    if (block.count_before[i + 1] > listed) offset[listed++] = static_cast<float>(i);
  }
  for (int i = listed; i < kKeyBlock; ++i) offset[i] = listed ? offset[listed - 1] : 0.0f;
}

// What the edit needs to know of a packed row.
struct EditedRow {
  float slope;       // 0: no ALiBi
  int64_t position;  // of its query
};

// Packed row r of an item sees tokens [first[r], limit[r]) of its row. Rows from num_rows to padded
// are like the last one. `edited` may be null. Out of line, as is CountBefore: once for all dtypes.
__attribute__((noinline)) inline void SetRows(const AttentionParams& params, const Row& row,
                                              const WorkItem& item, int num_rows, int padded,
                                              int64_t* first, int64_t* limit, EditedRow* edited) {
  for (int r = 0; r < padded; ++r) {
    const int64_t packed = item.packed_begin + (r < num_rows ? r : num_rows - 1);
    const int64_t query = packed / params.group_size;
    first[r] = FirstKey(row, query, params.sliding_window);
    limit[r] = VisibleKeys(row, query, params.causal);
    if (!edited) continue;
    const int64_t head = int64_t{item.kv_head} * params.group_size + packed % params.group_size;
    edited[r] = {params.alibi_slopes ? params.alibi_slopes[head] : 0.0f, QueryPosition(row, query)};
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

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_KERNEL_LOGITS_H_
