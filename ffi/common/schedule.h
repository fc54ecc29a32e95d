// SPDX-License-Identifier: Apache-2.0

// How one attention call is cut into work items. Device-agnostic: plain arithmetic on plain arrays.
//
//   row    one sequence of the batch. Its q_len x group_size "packed rows" (query-major, the heads
//          of a group inside) share each KV head. Few packed rows: a decode row; more: a prefill
//          row.
//   unit   (row, KV head, block of packed rows). A decode row is one block, a prefill row is cut
//          into blocks of at most kPrefillBlock packed rows, of whole queries where they fit.
//   split  a range of `split_tokens` KV tokens of a unit, at multiples of split_tokens from the
//          first token that the row sees (token 0, or the left edge of its window), so that all
//          blocks of a row share their boundaries. Pinned tokens are splits of their own, before
//          those of the window. A split yields a partial result (m, l, O); the partials of a unit
//          are always folded in ascending order, whoever computed them.
//   item   what a worker claims: consecutive splits of one unit. A unit that is one item folds its
//          splits on the way and needs no memory for partials.
//
// The split boundaries of a row depend on its own lengths and, when the split is automatic, on the
// batch and the number of workers; never on timing.

#ifndef JAX_PAGED_COMMON_SCHEDULE_H_
#define JAX_PAGED_COMMON_SCHEDULE_H_

#include <cstdint>

#include "common/integers.h"
#include "common/params.h"

namespace jax_paged {

inline constexpr int32_t kDecodeMaxRows = 16;    // packed rows of a decode row
inline constexpr int32_t kPrefillBlock = 192;    // packed rows of a prefill block, at most
inline constexpr int32_t kKeyBlock = 64;         // KV tokens that a kernel takes at once, at most
inline constexpr int64_t kMinSplitTokens = 256;  // automatic splits are not shorter
inline constexpr int64_t kItemsPerWorker = 4;    // aimed at by automatic splits
inline constexpr int64_t kMaxSplitTokens = 1 << 30;
// Below this cost, some 10 microseconds of work, a second worker costs more than it brings, even if
// it is awake (docs/performance.md, Attention over few tokens).
inline constexpr int64_t kSerialCost = 200'000;

struct ScheduleOptions {
  int32_t group_size;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;
  bool causal;
  int64_t num_workers;
  int64_t num_kv_splits;  // 0: automatic, n: that many per row
  int64_t split_tokens;   // 0: off, n: splits of n tokens, whatever the batch
};

enum class RowKind : int32_t { kEmpty = 0, kDecode = 1, kPrefill = 2 };

struct RowPlan {
  RowKind kind;  // kEmpty: no query or no key, nothing to compute
  int64_t packed_rows;
  int64_t block_rows;
  int64_t num_blocks;
  int64_t split_tokens;
  int64_t first_key;  // KV tokens before it, the pinned ones aside, are seen by no query
  int64_t kv_splits;  // of the row's unit that has most
};

struct WorkItem {
  int32_t row;
  int32_t kv_head;
  int64_t packed_begin;  // packed rows [packed_begin, packed_end) of the row
  int64_t packed_end;
  int32_t split_begin;  // splits [split_begin, split_end) of the unit's num_splits
  int32_t split_end;
  int32_t num_splits;
  int32_t shared_unit;  // counts units of several items, -1: the item is the whole unit
  int64_t pinned;       // the unit sees KV tokens [0, pinned) and [first_key, keys)
  int64_t first_key;
  int64_t keys;
  int32_t pinned_splits;  // the first splits, from token 0 on
  int64_t split_origin;   // token that the split after them starts from, at most first_key
  int64_t split_tokens;   // of the row
  int64_t partials;       // shared unit: offset in floats of the partial of split 0
  int64_t cost;           // of the item
};

struct PlanTotals {
  int64_t cost;         // of the call
  int64_t target_cost;  // of an item
  int64_t items;
  int64_t shared_units;
  int64_t partial_floats;
  bool has_prefill;
};

// Where query `query` of the row stands among the row's tokens; negative when there are more
// queries than tokens.
inline int64_t QueryPosition(const Row& row, int64_t query) {
  return int64_t{row.seq_len} - row.q_len + query;
}

// First key that query `query` of the row sees beside the pinned ones, if it sees any. Ascends with
// the query: so in a tree, where a query stands at its depth, it is that of the roots.
inline int64_t FirstKey(const Row& row, int64_t query) {
  if (row.window <= 0) return row.num_pinned;
  const int64_t root = int64_t{row.seq_len} - row.tree_size;
  const int64_t stored = QueryPosition(row, query);
  const int64_t position = row.tree_size > 0 && stored > root ? root : stored;
  return Clamp(position - row.window + 1, row.num_pinned, row.seq_len);
}

// End of the keys that query `query` of the row sees. Ascends with the query.
inline int64_t VisibleKeys(const Row& row, int64_t query, bool causal) {
  if (!causal) return row.seq_len;
  return Clamp(QueryPosition(row, query) + 1, 0, row.seq_len);
}

// Reads lengths that nobody has checked: stored tokens into [0, capacity], cu_q_lens monotone in
// [0, num_tokens], num_seqs into [0, max_seqs]; a window leaves a query at least itself. Returns
// the number of live rows; live tokens are [rows[0].q_begin, rows[n - 1].q_begin + rows[n -
// 1].q_len).
inline int32_t SanitizeRows(const int32_t* cu_q_lens, const int32_t* seq_lens,
                            const RowWindows& windows, int64_t num_seqs, int64_t max_seqs,
                            int64_t num_tokens, int64_t capacity, Row* rows) {
  num_seqs = Clamp(num_seqs, 0, max_seqs);
  if (num_seqs == 0) return 0;
  int64_t begin = Clamp(cu_q_lens[0], 0, num_tokens);
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t end = Clamp(cu_q_lens[i + 1], begin, num_tokens);
    rows[i].q_begin = static_cast<int32_t>(begin);
    rows[i].q_len = static_cast<int32_t>(end - begin);
    const int64_t offset = windows.slot_offset ? Clamp(windows.slot_offset[i], 0, INT32_MAX) : 0;
    const int64_t stored = Clamp(Clamp(seq_lens[i], 0, INT32_MAX) - offset, 0, capacity);
    const int64_t pinned = windows.num_pinned ? Clamp(windows.num_pinned[i], 0, INT32_MAX) : 0;
    int64_t window = 0;
    if (windows.sliding_window) window = windows.sliding_window[windows.one_for_all ? 0 : i];
    if (window > 0) window = Clamp(window - pinned, 1, INT32_MAX);
    rows[i].seq_len = static_cast<int32_t>(stored);
    rows[i].tree_size = 0;
    rows[i].window = static_cast<int32_t>(Clamp(window, 0, INT32_MAX));
    rows[i].num_pinned = static_cast<int32_t>(Clamp(pinned, 0, stored));
    rows[i].slot_offset = static_cast<int32_t>(offset);
    begin = end;
  }
  return static_cast<int32_t>(num_seqs);
}

inline int64_t BlockRows(const RowPlan& plan, int64_t block) {
  const int64_t rest = plan.packed_rows - block * plan.block_rows;
  return rest < plan.block_rows ? rest : plan.block_rows;
}

// The KV tokens [0, pinned) and [first, end) that a block of packed rows sees, and how they are
// cut.
struct BlockKeys {
  int64_t pinned;
  int64_t first;
  int64_t end;
  int64_t pinned_splits;
  int64_t split_origin;
  int64_t splits;  // the pinned ones, and then the others

  int64_t count() const { return pinned + end - first; }
};

inline BlockKeys KeysOfBlock(const Row& row, const RowPlan& plan, int64_t block,
                             const ScheduleOptions& options) {
  const int64_t begin = block * plan.block_rows;
  const int64_t last = begin + BlockRows(plan, block) - 1;
  BlockKeys keys;
  keys.end = VisibleKeys(row, last / options.group_size, options.causal);
  keys.first = Clamp(FirstKey(row, begin / options.group_size), 0, keys.end);
  keys.pinned = Clamp(row.num_pinned, 0, keys.first);
  keys.pinned_splits = CeilDiv(keys.pinned, plan.split_tokens);
  keys.split_origin =
      plan.first_key + (keys.first - plan.first_key) / plan.split_tokens * plan.split_tokens;
  keys.splits = keys.pinned_splits;
  if (keys.end > keys.first)
    keys.splits += CeilDiv(keys.end - keys.split_origin, plan.split_tokens);
  return keys;
}

// KV tokens [begin, end) of a split.
struct KeySpan {
  int64_t begin;
  int64_t end;
  bool pinned;  // no window hides them
};

inline KeySpan SpanOfSplit(const WorkItem& item, int64_t split) {
  if (split < item.pinned_splits) {
    const int64_t begin = split * item.split_tokens;
    return {begin, Clamp(begin + item.split_tokens, begin, item.pinned), /*pinned=*/true};
  }
  const int64_t origin = item.split_origin + (split - item.pinned_splits) * item.split_tokens;
  const int64_t end = Clamp(origin + item.split_tokens, origin, item.keys);
  return {Clamp(origin, item.first_key, end), end, /*pinned=*/false};
}

// Multiply-adds of `rows` packed rows on `keys` tokens. One or two rows cost as much as four: they
// are bound by reading K and V.
inline int64_t WorkCost(int64_t rows, int64_t keys, const ScheduleOptions& options) {
  return (rows < 4 ? 4 : rows) * keys * (int64_t{options.head_dim} + options.v_head_dim);
}

inline RowPlan ShapeRow(const Row& row, const ScheduleOptions& options) {
  RowPlan plan = {RowKind::kEmpty, 0, 0, 0, kMaxSplitTokens, 0, 0};
  if (row.q_len == 0 || row.seq_len == 0) return plan;
  plan.first_key = FirstKey(row, /*query=*/0);
  plan.packed_rows = int64_t{row.q_len} * options.group_size;
  if (plan.packed_rows <= kDecodeMaxRows) {
    plan.kind = RowKind::kDecode;
    plan.num_blocks = 1;
    plan.block_rows = plan.packed_rows;
  } else {
    plan.kind = RowKind::kPrefill;
    // What would be a single block is cut into halves, so that two workers share it.
    const bool is_short = plan.packed_rows <= kPrefillBlock;
    plan.num_blocks = CeilDiv(plan.packed_rows, is_short ? kPrefillBlock / 2 : kPrefillBlock);
    plan.block_rows = RoundUp(CeilDiv(plan.packed_rows, plan.num_blocks), options.group_size);
    plan.block_rows = Clamp(plan.block_rows, 1, kPrefillBlock);
    plan.num_blocks = CeilDiv(plan.packed_rows, plan.block_rows);
  }
  return plan;
}

// Items that a unit is cut into: as many as it takes to come near the target, one split at least
// each.
inline int64_t UnitItems(int64_t unit_cost, int64_t num_splits, int64_t target_cost) {
  return Clamp(CeilDiv(unit_cost, target_cost), 1, num_splits);
}

// Floats of one partial: O [rows, v_head_dim], then m [rows] and l [rows].
inline int64_t PartialFloats(int64_t rows, int64_t v_head_dim) {
  return RoundUp(rows * (v_head_dim + 2), 16);
}

// Items that automatic splits aim at.
inline int64_t WantedItems(const ScheduleOptions& options) {
  return options.num_workers > 1 ? options.num_workers * kItemsPerWorker : 1;
}

// Plans `num_rows` rows into plans[num_rows] and says how much FillItems will write.
inline PlanTotals PlanRows(const ScheduleOptions& options, const Row* rows, int32_t num_rows,
                           RowPlan* plans) {
  PlanTotals totals = {0, 1, 0, 0, 0, false};
  for (int32_t i = 0; i < num_rows; ++i) {
    plans[i] = ShapeRow(rows[i], options);
    totals.has_prefill |= plans[i].kind == RowKind::kPrefill;
    for (int64_t b = 0; b < plans[i].num_blocks; ++b) {
      const int64_t keys = KeysOfBlock(rows[i], plans[i], b, options).count();
      totals.cost += options.num_kv_heads * WorkCost(BlockRows(plans[i], b), keys, options);
    }
  }
  totals.target_cost = Clamp(totals.cost / WantedItems(options), 1, INT64_MAX);
  for (int32_t i = 0; i < num_rows; ++i) {
    RowPlan& plan = plans[i];
    if (plan.kind == RowKind::kEmpty) continue;
    int64_t keys = 1;  // of the longest block
    for (int64_t b = 0; b < plan.num_blocks; ++b) {
      keys = Clamp(KeysOfBlock(rows[i], plan, b, options).count(), keys, INT32_MAX);
    }
    if (options.split_tokens > 0) {
      plan.split_tokens = Clamp(options.split_tokens, 1, kMaxSplitTokens);
    } else if (options.num_kv_splits > 0) {
      plan.split_tokens = CeilDiv(keys, Clamp(options.num_kv_splits, 1, keys));
    } else if (options.num_workers > 1) {
      const int64_t cost = WorkCost(plan.block_rows, keys, options);
      const int64_t pieces = UnitItems(cost, CeilDiv(keys, kMinSplitTokens), totals.target_cost);
      if (pieces > 1) plan.split_tokens = RoundUp(CeilDiv(keys, pieces), kKeyBlock);
    }
    for (int64_t b = 0; b < plan.num_blocks; ++b) {
      const BlockKeys block_keys = KeysOfBlock(rows[i], plan, b, options);
      const int64_t block_rows = BlockRows(plan, b);
      const int64_t splits = block_keys.splits;
      plan.kv_splits = Clamp(splits, plan.kv_splits, INT64_MAX);
      const int64_t items = splits == 0
                                ? 1
                                : UnitItems(WorkCost(block_rows, block_keys.count(), options),
                                            splits, totals.target_cost);
      totals.items += items * options.num_kv_heads;
      if (items > 1) {
        totals.shared_units += options.num_kv_heads;
        totals.partial_floats +=
            options.num_kv_heads * splits * PartialFloats(block_rows, options.v_head_dim);
      }
    }
  }
  return totals;
}

// PlanRows, with one worker (also in *options) for a call too small to share.
inline PlanTotals PlanCall(ScheduleOptions* options, const Row* rows, int32_t num_rows,
                           RowPlan* plans) {
  const PlanTotals totals = PlanRows(*options, rows, num_rows, plans);
  if (totals.cost >= kSerialCost || options->num_workers == 1) return totals;
  options->num_workers = 1;
  return PlanRows(*options, rows, num_rows, plans);
}

// Writes the items[totals.items] of a plan, in row order.
inline void FillItems(const ScheduleOptions& options, const Row* rows, int32_t num_rows,
                      const RowPlan* plans, const PlanTotals& totals, WorkItem* items) {
  int64_t partials = 0;
  int32_t shared_units = 0;
  for (int32_t i = 0; i < num_rows; ++i) {
    const RowPlan& plan = plans[i];
    for (int64_t b = 0; b < plan.num_blocks; ++b) {
      const BlockKeys keys = KeysOfBlock(rows[i], plan, b, options);
      const int64_t block_rows = BlockRows(plan, b);
      const int64_t splits = keys.splits;
      const int64_t cost = WorkCost(block_rows, keys.count(), options);
      const int64_t pieces = splits == 0 ? 1 : UnitItems(cost, splits, totals.target_cost);
      for (int32_t head = 0; head < options.num_kv_heads; ++head) {
        WorkItem item;
        item.row = i;
        item.kv_head = head;
        item.packed_begin = b * plan.block_rows;
        item.packed_end = item.packed_begin + block_rows;
        item.num_splits = static_cast<int32_t>(splits);
        item.shared_unit = pieces > 1 ? shared_units++ : -1;
        item.pinned = keys.pinned;
        item.first_key = keys.first;
        item.keys = keys.end;
        item.pinned_splits = static_cast<int32_t>(keys.pinned_splits);
        item.split_origin = keys.split_origin;
        item.split_tokens = plan.split_tokens;
        item.partials = partials;
        if (pieces > 1) partials += splits * PartialFloats(block_rows, options.v_head_dim);
        for (int64_t p = 0; p < pieces; ++p) {
          item.split_begin = static_cast<int32_t>(splits * p / pieces);
          item.split_end = static_cast<int32_t>(splits * (p + 1) / pieces);
          item.cost = cost / pieces;
          *items++ = item;
        }
      }
    }
  }
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_SCHEDULE_H_
