// SPDX-License-Identifier: Apache-2.0

// 8-bit K and V, and K that is turned here (rope inside attention): a block's tokens are converted
// to floats, times their scale, in the worker's scratch, and the kernels of float run on them.
// Included by inst/<isa>.cc inside its target
// region (isa.h), after logits.h.
//
// The float kernels then serve every dtype of q with such pages: no instance of their own. A
// block's floats stay in L1 or L2; while one is converted, the codes of the next are prefetched.

#ifndef JAX_PAGED_CPU_ATTENTION_STAGE_H_
#define JAX_PAGED_CPU_ATTENTION_STAGE_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

template <typename C>
constexpr bool kIsEightBit = sizeof(C) == 1;

// to[0, dim) = codes * scale.
template <typename C>
JAX_PAGED_INLINE void StageToken(const void* codes, int64_t dim, float scale, float* to) {
  const C* from = static_cast<const C*>(codes);
  const Vec factor = Set1(scale);
  int64_t d = 0;
  if constexpr (kIsEightBit<C>) {
    for (; d + kWidth <= dim; d += kWidth) Store(to + d, Mul(LoadBytes(from + d), factor));
    if constexpr (kWidth > kHalf) {
      if (d < dim) Store(to + d, Mul(LoadHalfBytes(from + d), factor));
    }
  } else {
    for (; d < dim; d += kWidth) Store(to + d, LoadTail(from + d, dim - d));
  }
}

template <typename C>
void StageTokens(const float* const* tokens, const float* const* next, int count, int64_t dim,
                 const float* scales, float* stage, int64_t stride) {
  for (int t = 0; t < count; ++t) {
    PrefetchRow(next[t], dim * int64_t{sizeof(C)});
    StageToken<C>(tokens[t], dim, scales[t], stage + t * stride);
  }
}

// scales[i] of the block's listed tokens [begin, end) of a row.
inline void ListScales(const KvScale& scale, const AttentionParams& params, int32_t row,
                       int32_t kv_head, int64_t begin, int64_t end, float* scales) {
  if (!scale.per_token) {
    const float all = scale.data ? scale.data[kv_head] : 1.0f;
    for (int i = 0; i < kKeyBlock; ++i) scales[i] = all;
    return;
  }
  const RowPages pages = PagesOf(params, row);
  const int64_t page_size = params.k.page_size;
  int64_t page = begin / page_size, offset = begin % page_size;
  int listed = 0;
  for (int64_t token = begin; token < end; ++page, offset = 0) {
    int64_t run = page_size - offset;
    if (run > end - token) run = end - token;
    token += run;
    if (!params.k.IsPage(pages[page])) continue;
    const int64_t first = (pages[page] * params.num_kv_heads + kv_head) * page_size;
    const float* from = scale.data + first + offset;
    for (int64_t i = 0; i < run; ++i) scales[listed++] = from[i];
  }
}

// Prefetches what ListScales would read.
inline void PrefetchScales(const KvScale& scale, const AttentionParams& params, int32_t row,
                           int32_t kv_head, int64_t begin, int64_t end) {
  if (!scale.per_token || begin >= end) return;
  const RowPages pages = PagesOf(params, row);
  const int64_t page_size = params.k.page_size;
  for (int64_t page = begin / page_size; page * page_size < end; ++page) {
    if (!params.k.IsPage(pages[page])) continue;
    const int64_t first = (pages[page] * params.num_kv_heads + kv_head) * page_size;
    const char* from = reinterpret_cast<const char*>(scale.data + first);
    for (int64_t i = 0; i < page_size * int64_t{sizeof(float)}; i += 64) Prefetch(from + i);
  }
}

template <typename T>
JAX_PAGED_INLINE void RoundRowTo(float* x, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kWidth) {
    T rounded[kWidth];
    Store(rounded, Load(x + d));
    Store(x + d, Load(rounded));
  }
}

// Rope of one head, in scratch. The result is rounded to the dtype of what was turned, as if it had
// been turned before it was written to a page; that of 8-bit codes stays as it is.
JAX_PAGED_INLINE void TurnRow(const RopeTables& rope, int64_t position, Dtype dtype, int64_t stride,
                              float* x) {
  // Positions beyond the tables are masked, so any angle will do for them.
  const int64_t at = Clamp(position, 0, rope.max_positions - 1) * rope.half;
  TurnHead(x, rope.cos + at, rope.sin + at, rope.half, rope.interleaved);
  if (dtype == Dtype::kBFloat16) RoundRowTo<BFloat16>(x, stride);
  if (dtype == Dtype::kFloat16) RoundRowTo<Float16>(x, stride);
}

// Turns the listed tokens of a block, which lie in scratch, by the places at which they stand.
inline void TurnKeys(const AttentionParams& params, const Row& row, int32_t row_index,
                     const KeySpan& span, const KeyBlock<float>& block,
                     const WorkerScratch& scratch) {
  const int64_t offset = span.pinned ? 0 : row.slot_offset;
  for (int i = 0; i < kKeyBlock; ++i) {
    const int listed = block.count_before[i];
    if (block.count_before[i + 1] == listed) continue;
    const int64_t token = PositionOf(params, row, row_index, block.begin + i) + offset;
    TurnRow(params.rope, token, params.kv_dtype, scratch.q_stride,
            scratch.k_stage + listed * scratch.q_stride);
  }
}

// Turns the queries of a unit, which lie in scratch.
inline void TurnQueries(const AttentionParams& params, const Row& row, const WorkItem& item,
                        const WorkerScratch& scratch) {
  for (int64_t r = 0; r < item.packed_end - item.packed_begin; ++r) {
    const int64_t query = (item.packed_begin + r) / params.group_size;
    const int64_t token = TokenAt(params, row, item.row, QueryPosition(row, query));
    TurnRow(params.rope, token, params.dtype, scratch.q_stride, scratch.q + r * scratch.q_stride);
  }
}

// `staged`: the listed tokens of `codes`, whose k and v point at elements of kv_dtype, as floats in
// scratch. `next` is prefetched.
__attribute__((noinline)) inline void StageKeys(const AttentionParams& params, const Row& row,
                                                const WorkItem& item, const KeySpan& span,
                                                const KeyBlock<float>& codes,
                                                const KeyBlock<float>& next, int64_t end,
                                                const WorkerScratch& scratch,
                                                KeyBlock<float>* staged) {
  float k_scales[kKeyBlock], v_scales[kKeyBlock];
  ListScales(params.k_scale, params, item.row, item.kv_head, codes.begin, end, k_scales);
  ListScales(params.v_scale, params, item.row, item.kv_head, codes.begin, end, v_scales);
  const int count = codes.count;
  const int64_t k_dim = params.head_dim, v_dim = params.v_head_dim;
  const int64_t k_stride = scratch.q_stride, v_stride = scratch.o_stride;
  const auto stage = [&](auto element) {
    using C = decltype(element);
    StageTokens<C>(codes.k, next.k, count, k_dim, k_scales, scratch.k_stage, k_stride);
    StageTokens<C>(codes.v, next.v, count, v_dim, v_scales, scratch.v_stage, v_stride);
  };
  switch (params.kv_dtype) {
    case Dtype::kInt8:
      stage(Int8{});
      break;
    case Dtype::kFloat8E4M3:
      stage(Float8E4M3{});
      break;
    case Dtype::kFloat8E5M2:
      stage(Float8E5M2{});
      break;
    case Dtype::kBFloat16:
      stage(BFloat16{});
      break;
    case Dtype::kFloat16:
      stage(Float16{});
      break;
    case Dtype::kFloat32:
      stage(float{});
      break;
  }
  if (params.rope.cos) TurnKeys(params, row, item.row, span, codes, scratch);
  staged->begin = codes.begin;
  staged->count = count;
  __builtin_memcpy(staged->count_before, codes.count_before, sizeof(codes.count_before));
  for (int t = 0; t < kKeyBlock; ++t) {
    const int listed = t < count ? t : (count > 0 ? count - 1 : 0);
    staged->k[t] = scratch.k_stage + listed * k_stride;
    staged->v[t] = scratch.v_stage + listed * v_stride;
  }
}

// Queries of any dtype for the float kernels; see LoadQueries.
template <typename Q>
void LoadQueriesAs(const AttentionParams& params, const Row& row, const WorkItem& item, float sign,
                   int64_t padded_rows, const WorkerScratch& scratch) {
  const int64_t num_rows = item.packed_end - item.packed_begin;
  const Vec factor = Set1(sign);
  for (int64_t r = 0; r < padded_rows; ++r) {
    float* q = scratch.q + r * scratch.q_stride;
    for (int64_t d = 0; d < scratch.q_stride; d += kWidth) Store(q + d, Zero());
    if (r >= num_rows) continue;
    const Q* source = static_cast<const Q*>(params.q) +
                      QueryHead(params, row, item, item.packed_begin + r) * params.head_dim;
    for (int64_t d = 0; d < params.head_dim; d += kWidth) {
      Store(q + d, Mul(factor, LoadTail(source + d, params.head_dim - d)));
    }
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_STAGE_H_
