// SPDX-License-Identifier: Apache-2.0

// From products q.k to logits, and from the sums of a softmax to its result. Order on a logit:
// scale, soft cap, ALiBi, mask, sink.
//
// Options are run-time branches, the same for all threads of a launch: there is no kernel instance
// for them. A plain call folds its scale into the exponent; one with a soft cap or ALiBi edits the
// products, in registers, to logits in natural units (LogitOptions::edits).

#ifndef JAX_PAGED_CUDA_ATTENTION_LOGITS_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LOGITS_CUH_

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Where query `query` stands among the row's tokens; negative where there are more queries than
// tokens.
JAX_PAGED_DEVICE int32_t QueryPosition(const RowLengths& lengths, int32_t query) {
  return lengths.seq_len - lengths.q_len + query;
}

// Stored tokens at the front of a row that no window hides.
JAX_PAGED_DEVICE int32_t NumPinned(const AttentionArgs& args, int32_t row) {
  if (!args.num_pinned) return 0;
  const int32_t pinned = prim::LoadConst(args.num_pinned + row);
  return pinned < 0 ? 0 : pinned;
}

// How far behind the place where it is stored the token in `slot` of a row stands.
JAX_PAGED_DEVICE int32_t SlidBy(const AttentionArgs& args, int32_t row, int32_t slot) {
  if (!args.num_pinned || slot < NumPinned(args, row)) return 0;
  const int32_t offset = prim::LoadConst(args.slot_offset + row);
  return offset < 0 ? 0 : offset;
}

// Tokens that a row stores: at most what its pages can. `stored`: what seq_lens says.
JAX_PAGED_DEVICE int32_t StoredTokens(const AttentionArgs& args, int32_t row, int32_t stored) {
  if (stored < 0) return 0;
  if (args.num_pinned) {
    const int32_t offset = prim::LoadConst(args.slot_offset + row);
    if (offset > 0) stored -= offset;
  }
  return Clamp<int32_t>(stored, 0, args.capacity);
}
JAX_PAGED_DEVICE int32_t StoredTokens(const AttentionArgs& args, int32_t row) {
  return StoredTokens(args, row, prim::LoadConst(args.seq_lens + row));
}

// Whether the call's layer is one of the pools'. A plan serves all layers, so each kernel asks.
JAX_PAGED_DEVICE bool HasLayer(const AttentionArgs& args) {
  const int32_t layer = prim::LoadL2(args.layer);
  return layer >= 0 && layer < args.num_layers && args.num_pages > 0;
}

// First key in the window of the query at `position` of a row, pinned ones aside. TREES_AND_PINS:
// whether the kernel takes rows with a tree or pinned tokens.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE int32_t FirstKey(const AttentionArgs& args, int32_t row, int32_t position) {
  if (!args.sliding_window) return 0;
  int32_t window = prim::LoadConst(args.sliding_window + row * args.window_step);
  if (window <= 0) return 0;
  const int32_t pinned = TREES_AND_PINS ? NumPinned(args, row) : 0;
  window = window > pinned ? window - pinned : 1;
  return window > position ? 0 : position - window + 1;
}

// The factor from products, or edited logits, to units of log2, always positive; the rest of
// sm_scale is done to the bits of q, so that the largest logit always has the largest product, and
// a masked logit (-inf) never meets a factor 0.
struct LogitScale {
  float factor;
  bool is_negative;
  bool is_zero;
};

JAX_PAGED_DEVICE LogitScale LoadScale(const AttentionArgs& args) {
  const float scale = prim::LoadConst(args.sm_scale) * kLog2E;
  LogitScale result = {scale < 0.0f ? -scale : scale, scale < 0.0f, scale == 0.0f};
  if (result.is_zero) result.factor = 1.0f;
  if (args.logits.edits()) result.factor = kLog2E;
  return result;
}

// From the products of one query head to logits in natural units:
// soft_cap tanh(s sm_scale / soft_cap) + slope distance, distance being key - query.
struct alignas(16) LogitEdit {
  float factor;
  float soft_cap;
  float slope;

  JAX_PAGED_DEVICE float operator()(float s, float distance) const {
    float x = s * factor;
    if (soft_cap > 0.0f) x = soft_cap * prim::Tanh(x);
    return prim::Fma(slope, distance, x);
  }
};

JAX_PAGED_DEVICE LogitEdit LoadEdit(const AttentionArgs& args, int32_t head) {
  const float scale = prim::LoadConst(args.sm_scale);
  LogitEdit edit = {scale < 0.0f ? -scale : scale, args.logits.soft_cap, 0.0f};
  if (args.logits.soft_cap > 0.0f) edit.factor /= args.logits.soft_cap;
  if (args.logits.alibi_slopes) edit.slope = prim::LoadConst(args.logits.alibi_slopes + head);
  return edit;
}

// One more logit of a query head, without a value; -inf: none.
JAX_PAGED_DEVICE float LoadSink(const AttentionArgs& args, int32_t head) {
  return args.logits.sinks ? prim::LoadConst(args.logits.sinks + head) : kNegativeInfinity;
}

// What an fp8 output is divided by.
JAX_PAGED_DEVICE float OutScale(const AttentionArgs& args) {
  return args.out_scale ? prim::LoadConst(args.out_scale) : 1.0f;
}

// 0 instead of -inf, so that m - Base(m) is never -inf - -inf.
JAX_PAGED_DEVICE float Base(float m) { return m == kNegativeInfinity ? 0.0f : m; }

struct SoftmaxEnd {
  float factor;  // of O
  float lse;     // natural log
};

// From the largest logit (log2), the sum l of the weights relative to it, and the sink. l == 0: no
// key was seen, O may be 0 x NaN. NaN is no answer either, but must not become one: it stays NaN.
JAX_PAGED_DEVICE SoftmaxEnd EndSoftmax(float m, float l, float sink) {
  if (l == 0.0f) return {0.0f, sink};
  const float top = prim::Max(m, sink * kLog2E);
  const float keep = prim::Exp2(m - Base(top));
  const float sink_weight = prim::Exp2(prim::Fma(sink, kLog2E, -Base(top)));
  const float total = prim::Fma(l, keep, sink_weight);
  return {keep / total, Base(top) * kLn2 + prim::Log(total)};
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LOGITS_CUH_
