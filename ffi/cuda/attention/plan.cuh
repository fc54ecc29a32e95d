// SPDX-License-Identifier: Apache-2.0

// The planner: lengths on the device become ranges of work, with no help from the host. It runs in
// a call, before the attention kernels, or as an op of its own (jax_paged.attention_plan), whose
// plan serves many calls: the layers of a step.
//
//   row    one sequence. Its q_len x group_size packed rows (query-major, the heads of a group
//          inside) share each KV head.
//   unit   (row, KV head, tile of args.unit_rows packed rows), for the decode kernel, latent.cuh
//          or simt.cuh
//   piece  what a unit is made of: one KV tile where splits are automatic, else one split. The
//          first begins at the tile where the window of the row's first query does; where tokens
//          are pinned, with their tiles, and those of the window follow (FindGap).
//   position  of a piece. KV heads come in blocks of args.heads_together, and the workers in teams
//          of as many: worker i of each team takes head i of every block. So the heads of a page
//          are read at about the same time, which DRAM likes. Positions are numbered through by
//          row, block of heads, tile of packed rows and place in the unit. Behind each unit are
//          kUnitCost positions without a piece, where splits are automatic: what it costs to begin
//          and to end one. Team t owns the positions [t * chunk, (t + 1) * chunk), so all workers
//          have the same amount of work to within a piece, and at most two units of a worker are
//          shared with others (stream-K, after LeanAttention). Where all units are of one size and
//          there are no more of them than teams, each may be padded with positions to a multiple of
//          chunk instead: then each worker has a part of one unit.
//   prefill unit  (row, tile of args.prefill_rows packed rows, KV head) of a row with more than one
//          query and more than unit_rows packed rows; such a row has no units of the other kind.
//          A row with few queries on a long context has none: the decode kernel can spread it over
//          more CTAs (LongestPrefill). A CTA of prefill.cuh does a unit whole. Long units
//          should begin early: numbered row by row, rows with more keys first (to within a factor
//          of two), from a row's last tile, which sees most keys, to its first.
//
// Also: makes lengths and bounds safe, so that the attention kernels read nothing unchecked but the
// layer, which is not the plan's; in a call it does what is to be done in each call, too
// (begin.cuh). A plan fits every call of the same shapes, options and device. One of other lengths
// gives wrong numbers there, but its rows, tokens, units and slots are within the same bounds.
//
// Grid: any number of CTAs of 256 threads. Each walks all rows (a scan of a few hundred numbers,
// cheaper than a second launch); CTA 0 writes the plan, the CTAs share depths and zero-filling.
// Bound by latency.

#ifndef JAX_PAGED_CUDA_ATTENTION_PLAN_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PLAN_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/begin.cuh"
#include "cuda/attention/logits.cuh"
#include "cuda/attention/tree.cuh"
#include "cuda/block_scan.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A unit is not spread over more workers than this while their share is below kFewTiles: merging
// costs more than it saves. On an H100 a part of a unit costs as much as 0.1 of a tile there: one
// row of 4096 tokens takes 21.5, 18.7 and 20.4 us in 8, 16 and 32 parts.
inline constexpr int32_t kManySplits = 16;
inline constexpr int32_t kFewTiles = 4;
// A prefill unit of no more tiles than this is never too long.
inline constexpr int64_t kLongTiles = 16;

struct PlanShared {
  alignas(16) int64_t warp_totals[kPlanWarps];
  int32_t end[kPlanThreads];
};

// BlockScan of sums, or of maxima. What an earlier one has left in warp_totals has been read.
template <bool MAX>
JAX_PAGED_DEVICE int64_t PlanScan(int64_t x, Shared<int64_t> warp_totals, int64_t* so_far) {
  const auto join = [](int64_t a, int64_t b) { return MAX ? (a > b ? a : b) : a + b; };
  prim::SyncThreads();
  return BlockScan(x, join, kPlanWarps, warp_totals, so_far);
}

struct RowPlan {
  RowLengths lengths;
  RowSplits splits;
};

// Nodes of a row's tree as it is given, chain or not.
JAX_PAGED_DEVICE int32_t GivenTree(const AttentionArgs& args, int32_t row, int32_t seq_len) {
  const int32_t most = seq_len < args.max_tree ? seq_len : args.max_tree;
  return Clamp<int32_t>(prim::LoadConst(args.tree_sizes + row), 0, most);
}

// The same, but 0 for a chain, in which every node sees all before it.
JAX_PAGED_DEVICE int32_t PlanTree(const AttentionArgs& args, int32_t row, int32_t seq_len) {
  const int32_t size = GivenTree(args, row, seq_len);
  int32_t latest = 0;  // first, and end, of the nodes so far
  int32_t earliest = size;
  bool is_chain = true;
  for (int32_t i = 0; i < size; ++i) {
    const TreeInterval node = LoadInterval(args, row, size, i);
    if (node.first > latest) latest = node.first;
    if (node.end < earliest) earliest = node.end;
    is_chain = is_chain && node.first == latest && node.first < earliest;
  }
  return is_chain ? 0 : size;
}

// Writes the depths of the nodes of the first `num_rows` rows; all threads of the grid share them.
JAX_PAGED_DEVICE void PlanDepths(const AttentionArgs& args, int32_t num_rows) {
  const int64_t count = int64_t{num_rows} * args.max_tree;
  const int64_t step = int64_t{prim::GridSize()} * kPlanThreads;
  for (int64_t i = int64_t{prim::BlockIndex()} * kPlanThreads + prim::ThreadIndex(); i < count;
       i += step) {
    const int32_t row = static_cast<int32_t>(i / args.max_tree);
    const int32_t node = static_cast<int32_t>(i - int64_t{row} * args.max_tree);
    const int32_t seq_len = StoredTokens(args, row);
    const int32_t size = GivenTree(args, row, seq_len);
    if (node >= size) continue;
    const int32_t place = LoadInterval(args, row, size, node).first;
    int32_t depth = 0;
    for (int32_t j = 0; j < node; ++j) {
      if (Holds(LoadInterval(args, row, size, j), place)) ++depth;
    }
    prim::Store(args.depths + i, depth);
  }
}

// KV tiles that the prefill units of a row read, all of them: 0 for a row that the decode kernel
// takes whole.
JAX_PAGED_DEVICE int64_t PrefillTilesOf(const AttentionArgs& args, int64_t q_len, int32_t seq_len) {
  const int64_t packed_rows = q_len * args.group_size;
  if (q_len <= 1 || packed_rows <= args.unit_rows) return 0;
  return args.num_kv_heads * CeilDiv(packed_rows, args.prefill_rows) *
         CeilDiv<int64_t>(seq_len, kTileTokens);
}

// How many KV tiles a prefill unit may have before its row goes to the decode kernel instead, which
// can spread it: with few queries on a long context the row's units would still run when all other
// CTAs are done. That is so many times a worker's fair share of the call as the decode kernel is
// slower: it reads K and V once for each unit_rows packed rows, and took about half as much longer
// (on an H100). Fixed splits: no limit, since bits must not depend on the batch. What it reads need
// not be in order; PlanRow's caller clamps it.
JAX_PAGED_DEVICE int64_t LongestPrefill(const AttentionArgs& args, int32_t num_seqs,
                                        Shared<int64_t> warp_totals) {
  if (args.prefill_rows == 0 || args.has_fixed_splits()) return INT64_MAX;
  int64_t total = 0;
  for (int32_t base = 0; base < args.max_seqs; base += kPlanThreads) {
    const int32_t row = base + prim::ThreadIndex();
    int64_t tiles = 0;
    if (row < num_seqs) {
      const int32_t begin =
          Clamp<int32_t>(prim::LoadConst(args.cu_q_lens + row), 0, args.num_tokens);
      const int32_t end =
          Clamp<int32_t>(prim::LoadConst(args.cu_q_lens + (row + 1)), 0, args.num_tokens);
      tiles = PrefillTilesOf(args, end - begin, StoredTokens(args, row));
    }
    PlanScan</*MAX=*/false>(tiles, warp_totals, &total);
  }
  const int32_t reads = args.prefill_rows / args.unit_rows;
  const int64_t most = CeilDiv(total, args.num_workers) * (reads > 4 ? reads / 2 : 2);
  return most > kLongTiles ? most : kLongTiles;
}

// Everything but first_slot. `longest_prefill`: see LongestPrefill.
JAX_PAGED_DEVICE RowPlan PlanRow(const AttentionArgs& args, int32_t row, int32_t q_begin,
                                 int32_t q_end, int32_t seq_len, int32_t tree_size,
                                 int64_t longest_prefill) {
  RowPlan plan = {{q_begin, q_end - q_begin, seq_len, 0}, {0, 1, 0}};
  if (plan.lengths.q_len == 0 || seq_len == 0) return plan;
  const int32_t packed_rows = plan.lengths.q_len * args.group_size;
  const bool is_decode = plan.lengths.q_len == 1 || packed_rows <= args.unit_rows;
  const int32_t first_key = RowFirstKey(args, row, plan.lengths, tree_size);
  const int32_t tiles = (seq_len - 1) / kTileTokens + 1 - FindGap(args, row, first_key).size;
  if (!is_decode && args.prefill_rows > 0 && tiles <= longest_prefill) {
    return plan;  // see PrefillUnits
  }
  plan.lengths.num_units =
      args.num_kv_heads * static_cast<int32_t>(CeilDiv(packed_rows, args.unit_rows));
  if (!args.has_fixed_splits()) {
    plan.splits.num_pieces = tiles;
    plan.splits.size = tiles + kUnitCost;
    return plan;
  }
  if (!is_decode) {
    plan.splits.size = tiles;
  } else if (args.split_tokens > 0) {
    plan.splits.size = static_cast<int32_t>(CeilDiv(args.split_tokens, kTileTokens));
  } else {
    plan.splits.size = static_cast<int32_t>(CeilDiv(tiles, args.num_kv_splits));
  }
  plan.splits.num_pieces = static_cast<int32_t>(CeilDiv(tiles, plan.splits.size));
  return plan;
}

JAX_PAGED_DEVICE int64_t PrefillUnits(const AttentionArgs& args, const RowLengths& lengths) {
  if (args.prefill_rows == 0 || lengths.num_units > 0) return 0;
  if (lengths.q_len == 0 || lengths.seq_len == 0) return 0;
  return args.num_kv_heads * CeilDiv(lengths.q_len * args.group_size, args.prefill_rows);
}

// Bits of the number of keys: about how long the row's longest prefill unit takes. 0: it has none.
JAX_PAGED_DEVICE int64_t PrefillSize(const AttentionArgs& args, const RowLengths& lengths) {
  int64_t bits = 0;
  if (PrefillUnits(args, lengths) > 0) {
    while (lengths.seq_len >> bits) ++bits;
  }
  return bits;
}

// Writes prefill_order and first_prefill: rows by falling size, and in their order where the size
// is the same. A walk over the rows for each size that occurs; `size` is the largest.
JAX_PAGED_DEVICE void OrderPrefill(const AttentionArgs& args, int64_t size,
                                   Shared<int64_t> warp_totals) {
  const int32_t thread = prim::ThreadIndex();
  int64_t listed = 0;  // units << 32 | rows
  while (size > 0) {
    int64_t next_size = 0;
    for (int32_t base = 0; base < args.max_seqs; base += kPlanThreads) {
      const int32_t row = base + thread;
      RowLengths lengths = {0, 0, 0, 0};
      if (row < args.max_seqs) lengths = prim::LoadL2(args.row_lengths + row);  // as it wrote them
      const int64_t row_size = PrefillSize(args, lengths);
      const int64_t mine = row_size == size ? PrefillUnits(args, lengths) << 32 | 1 : 0;
      const int64_t before = PlanScan</*MAX=*/false>(mine, warp_totals, &listed) - mine;
      if (mine > 0) {
        const int32_t rank = static_cast<int32_t>(before);
        prim::Store(args.prefill_order + rank, row);
        prim::Store(args.first_prefill + rank, before >> 32);
      }
      PlanScan</*MAX=*/true>(row_size < size ? row_size : 0, warp_totals, &next_size);
    }
    size = next_size;
  }
  for (int32_t i = static_cast<int32_t>(listed) + thread; i <= args.max_seqs; i += kPlanThreads) {
    prim::Store(args.first_prefill + i, listed >> 32);
  }
}

// How positions are shared among teams.
struct Shares {
  int64_t chunk;           // of a team
  int64_t unit_positions;  // of each unit; 0: what its row says
};

// The shares where splits are automatic. `num_units`: of all that one worker of each team has;
// `most_pieces`: of a unit. A unit more in a worker's range costs more than kUnitCost while memory
// is busy, with its merging. So where all units are of one size, they begin where a team does, if
// workers have but a few pieces more for it.
JAX_PAGED_DEVICE Shares SharesOf(const AttentionArgs& args, int64_t num_positions,
                                 int64_t num_units, int64_t most_pieces) {
  const int64_t teams = args.num_workers / args.heads_together;
  int64_t least = CeilDiv(most_pieces, kManySplits);
  if (least > kFewTiles) least = kFewTiles;
  Shares shares = {CeilDiv(num_positions, teams), 0};
  if (shares.chunk < least) shares.chunk = least;
  const int64_t positions = most_pieces + kUnitCost;
  if (num_units * positions != num_positions || num_units == 0) return shares;
  const int64_t most = shares.chunk + kUnitCost;
  if (num_units > teams) {
    const int64_t whole_units = RoundUp(shares.chunk, positions);
    return whole_units <= most ? Shares{whole_units, 0} : shares;
  }
  int64_t part = CeilDiv(most_pieces, teams / num_units);
  if (part < least) part = least;
  return part <= most ? Shares{part, RoundUp(most_pieces, part)} : shares;
}

JAX_PAGED_DEVICE void PlanCta(const AttentionArgs& args) {
  const int32_t thread = prim::ThreadIndex();
  const bool writes_plan = prim::BlockIndex() == 0;
  const Shared<char> shared = prim::SharedMemory();
  const Shared<int64_t> warp_totals = (shared + offsetof(PlanShared, warp_totals)).As<int64_t>();
  const Shared<int32_t> ends = (shared + offsetof(PlanShared, end)).As<int32_t>();
  const bool begins_call = static_cast<bool>(args.out);
  const bool is_fixed = args.has_fixed_splits();

  if (begins_call) ClearCounters(args);
  // Loads whose place does not depend on others come first, so that they are on their way together.
  const bool has_layer = !begins_call || HasLayer(args);
  const int32_t first_bound = prim::LoadL2(args.cu_q_lens);
  const int32_t num_seqs = Clamp<int32_t>(prim::LoadL2(args.num_seqs), 0, args.max_seqs);
  const int32_t first_token = num_seqs == 0 ? 0 : Clamp<int32_t>(first_bound, 0, args.num_tokens);
  if (args.max_tree > 0 && UsesPositions(args)) PlanDepths(args, num_seqs);
  const int64_t longest_prefill = LongestPrefill(args, num_seqs, warp_totals);
  int64_t last_token = first_token;  // carried from one block of rows to the next
  int64_t num_positions = 0;
  int64_t num_units = 0;
  int64_t num_slots = 0;
  int64_t most_pieces = 0;
  int64_t prefill_size = 0;
  for (int32_t base = 0; base < args.max_seqs; base += kPlanThreads) {
    const int32_t row = base + thread;
    const bool is_live = row < num_seqs;
    int32_t stored = 0;
    int64_t bound = 0;
    if (row < args.max_seqs) {
      stored = prim::LoadL2(args.seq_lens + row);
      bound = Clamp<int32_t>(prim::LoadL2(args.cu_q_lens + (row + 1)), 0, args.num_tokens);
    }
    if (!is_live) bound = 0;
    const int32_t block_begin = static_cast<int32_t>(last_token);
    const int32_t end =
        static_cast<int32_t>(PlanScan</*MAX=*/true>(bound, warp_totals, &last_token));
    prim::Store(ends + thread, end);
    prim::SyncThreads();
    const int32_t begin = thread == 0 ? block_begin : prim::Load(ends + (thread - 1));

    const int32_t seq_len = is_live ? StoredTokens(args, row, stored) : 0;
    int32_t tree_size = 0;
    if (args.max_tree > 0 && row < args.max_seqs) {
      if (is_live) tree_size = PlanTree(args, row, seq_len);
      if (writes_plan) prim::Store(args.row_trees + row, tree_size);
    }
    RowPlan plan = PlanRow(args, row, begin, end, seq_len, tree_size, longest_prefill);
    const int64_t units = plan.lengths.num_units / args.heads_together;
    const int64_t positions = units * plan.splits.Positions(is_fixed);
    const int64_t first_position =
        PlanScan</*MAX=*/false>(positions, warp_totals, &num_positions) - positions;
    if (is_fixed) {
      const int64_t pieces = int64_t{plan.lengths.num_units} * plan.splits.num_pieces;
      const int64_t row_slots = plan.splits.num_pieces > 1 ? pieces : 0;
      plan.splits.first_slot =
          PlanScan</*MAX=*/false>(row_slots, warp_totals, &num_slots) - row_slots;
    } else {
      PlanScan</*MAX=*/false>(units, warp_totals, &num_units);
      PlanScan</*MAX=*/true>(plan.splits.num_pieces, warp_totals, &most_pieces);
    }
    if (args.prefill_rows > 0) {
      PlanScan</*MAX=*/true>(PrefillSize(args, plan.lengths), warp_totals, &prefill_size);
    }
    if (writes_plan && row < args.max_seqs) {
      prim::Store(args.row_lengths + row, plan.lengths);
      prim::Store(args.row_splits + row, plan.splits);
      prim::Store(args.first_position + row, first_position);
    }
    const int32_t warp_rows = base / kWarpLanes + prim::WarpIndex();
    if (begins_call && warp_rows % prim::GridSize() == prim::BlockIndex()) {
      FillRows(args, plan.lengths, has_layer);
    }
  }
  if (begins_call) FillPadding(args, first_token, static_cast<int32_t>(last_token));

  if (writes_plan && args.prefill_rows > 0) OrderPrefill(args, prefill_size, warp_totals);
  if (!writes_plan) return;
  Shares shares = {CeilDiv(num_positions, args.num_workers / args.heads_together), 0};
  if (!is_fixed) shares = SharesOf(args, num_positions, num_units, most_pieces);
  if (shares.unit_positions > 0) {
    const int32_t size = static_cast<int32_t>(shares.unit_positions);
    for (int32_t row = thread; row < args.max_seqs; row += kPlanThreads) {  // as it wrote them
      const int64_t first_unit =
          prim::LoadL2(args.first_position + row) / (most_pieces + kUnitCost);
      const int32_t num_pieces = prim::LoadL2<RowSplits>(args.row_splits + row).num_pieces;
      prim::Store(args.first_position + row, first_unit * size);
      prim::Store(args.row_splits + row, RowSplits{num_pieces, size, 0});
    }
    num_positions = num_units * size;
  }
  if (thread == 0) {
    prim::Store(args.row_lengths + args.max_seqs,
                RowLengths{static_cast<int32_t>(last_token), 0, 0, 0});
    prim::Store(args.first_position + args.max_seqs, num_positions);
    prim::Store(args.header, PlanHeader{num_positions, shares.chunk});
    prim::Store(args.launches,
                PlanLaunches{args.stages, args.prefill_rows, args.unit_rows, args.num_workers});
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PLAN_CUH_
