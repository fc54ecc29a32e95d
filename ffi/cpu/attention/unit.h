// SPDX-License-Identifier: Apache-2.0

// One work item from queries to output, and the table of kernels of an instruction set. Included
// last by inst/<isa>.cc inside its target region (isa.h).

#ifndef JAX_PAGED_CPU_ATTENTION_UNIT_H_
#define JAX_PAGED_CPU_ATTENTION_UNIT_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// WORDS: decode with bf16 queries and 8-bit pages (decode_words.h).
template <typename T, bool WORDS = false>
void RunItem(const AttentionParams& params, const Row& row, const WorkItem& item,
             const WorkerScratch& scratch, float* partials) {
  const int64_t num_rows = item.packed_end - item.packed_begin;
  const bool decode = WORDS || int64_t{row.q_len} * params.group_size <= kDecodeMaxRows;
  const int64_t padded_rows =
      decode ? DecodePaddedRows(num_rows) : RoundUp(num_rows, kPrefillRows<T>);
  const LogitScale scale(params);
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

  const Partial part = {scratch.o, scratch.m, scratch.l, scratch.o_stride};
  const Partial total = {scratch.total_o, scratch.total_m, scratch.total_l, scratch.o_stride};
  const bool whole_unit = item.shared_unit < 0;
  const bool fold = whole_unit && item.num_splits > 1;
  if (fold) ClearPartial(total, num_rows, params.v_head_dim);
  ClearPartial(part, padded_rows, params.v_head_dim);
  for (int64_t split = item.split_begin; split < item.split_end; ++split) {
    if (split > item.split_begin) ClearPartial(part, padded_rows, params.v_head_dim);
    const KeySpan span = SpanOfSplit(item, split);
    if constexpr (WORDS) {
#ifdef JAX_PAGED_DOT_BFLOAT16
      DecodeWordSplit(params, row, item, scale, span, scratch, part);
#endif
    } else if (decode) {
      DecodeSplit<T>(params, row, item, scale, span, scratch, part);
    } else {
      PrefillSplit<T>(params, row, item, scale, span, scratch, part);
    }
    if (fold) {
      FoldPartial(total, part, num_rows, params.v_head_dim);
    } else if (!whole_unit) {
      CopyPartial(part, StoredPartial(params, item, split, partials), num_rows, params.v_head_dim);
    }
  }
  if (!whole_unit) return;
  if constexpr (WORDS) {
    WriteOutput<float>(params, row, item, fold ? total : part);
  } else {
    WriteOutput<T>(params, row, item, fold ? total : part);
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
