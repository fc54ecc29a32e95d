// SPDX-License-Identifier: Apache-2.0

// Work items from queries to output. Included last by inst/<isa>.cc inside its target region
// (isa.h).

#ifndef JAX_PAGED_CPU_ATTENTION_UNIT_H_
#define JAX_PAGED_CPU_ATTENTION_UNIT_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// The queries of an item as its kernels want them, whose rows past its own are zero.
template <typename T, bool WORDS>
void LoadItem(const AttentionParams& params, const Row& row, const WorkItem& item,
              const LogitScale& scale, int64_t padded_rows, const WorkerScratch& scratch) {
  if (WORDS) {
    LoadQueries<T>(params, row, item, scale.sign, padded_rows, scratch);
  } else if (IsStaged(params) && params.dtype == Dtype::kBFloat16) {
    LoadQueriesAs<BFloat16>(params, row, item, scale.sign, padded_rows, scratch);
  } else if (IsStaged(params) && params.dtype == Dtype::kFloat16) {
    LoadQueriesAs<Float16>(params, row, item, scale.sign, padded_rows, scratch);
  } else {
    LoadQueries<T>(params, row, item, scale.sign, padded_rows, scratch);
  }
  if (params.rope.cos) TurnQueries(params, row, item, scratch);
}

// What a worker takes after a split of its items: the next one, or the first of `next`. Of atoms
// nothing, for the list of a block is a copy of it.
inline Upcoming ComesAfter(const AttentionParams& params, const WorkItem* items, int64_t split,
                           const WorkItem* next) {
  if (params.has_atoms) return {};
  if (split + 1 < items->split_end) return {items, SpanOfSplit(*items, split + 1)};
  if (next) return {next, SpanOfSplit(*next, next->split_begin)};
  return {};
}

// WORDS: decode with bf16 queries and 8-bit pages (decode_words.h).
template <typename T, bool WORDS = false>
void RunItems(const AttentionParams& params, const Row& row, const WorkItem* items, int num_heads,
              const WorkItem* next, const WorkerScratch* scratch, float* partials) {
  const WorkItem& item = items[0];
  const int64_t num_rows = item.packed_end - item.packed_begin;
  const bool decode = WORDS || int64_t{row.q_len} * params.group_size <= kDecodeMaxRows;
  const int64_t padded_rows =
      decode ? DecodePaddedRows(num_rows) : RoundUp(num_rows, kPrefillRows<T>);
  const LogitScale scale(params);
  Partial parts[kHeadsTogether];
  for (int i = 0; i < num_heads; ++i) {
    LoadItem<T, WORDS>(params, row, items[i], scale, padded_rows, scratch[i]);
    parts[i] = {scratch[i].o, scratch[i].m, scratch[i].l, scratch[i].o_stride};
    ClearPartial(parts[i], padded_rows, params.v_head_dim);
  }

  const Partial total = {scratch[0].total_o, scratch[0].total_m, scratch[0].total_l,
                         scratch[0].o_stride};
  const bool whole_unit = item.shared_unit < 0;
  const bool fold = whole_unit && item.num_splits > 1;
  if (fold) ClearPartial(total, num_rows, params.v_head_dim);
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    if (split > item.split_begin) ClearPartial(parts[0], padded_rows, params.v_head_dim);
    const KeySpan span = SpanOfSplit(item, split);
    const Upcoming upcoming = ComesAfter(params, items, split, next);
    if constexpr (WORDS) {
#ifdef JAX_PAGED_DOT_BFLOAT16
      DecodeWordHeads(params, row, items, num_heads, scale, span, upcoming, scratch, parts);
#endif
    } else if (decode) {
      DecodeHeads<DecodeSplit<T>>(params, row, items, num_heads, scale, span, upcoming, scratch,
                                  parts);
    } else {
      PrefillSplit<T>(params, row, item, scale, span, scratch[0], parts[0]);
    }
    if (fold) {
      FoldPartial(total, parts[0], num_rows, params.v_head_dim);
    } else if (!whole_unit) {
      CopyPartial(parts[0], StoredPartial(params, item, split, partials), num_rows,
                  params.v_head_dim);
    }
  }
  if (!whole_unit) return;
  for (int i = 0; i < num_heads; ++i) {
    const Partial& result = fold ? total : parts[i];
    if constexpr (WORDS) {
      WriteOutput<float>(params, row, items[i], result);
    } else {
      WriteOutput<T>(params, row, items[i], result);
    }
  }
}

template <typename T>
void FoldUnit(const AttentionParams& params, const Row& row, const WorkItem& item,
              const WorkerScratch& scratch, float* partials) {
  const int64_t num_rows = item.packed_end - item.packed_begin;
  const Partial total = {scratch.total_o, scratch.total_m, scratch.total_l, scratch.o_stride};
  ClearPartial(total, num_rows, params.v_head_dim);
  for (int64_t split = 0; split < item.num_splits; ++split) {
    FoldPartial(total, StoredPartial(params, item, split, partials), num_rows, params.v_head_dim);
  }
  WriteOutput<T>(params, row, item, total);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_UNIT_H_
