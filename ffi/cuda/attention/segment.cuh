// SPDX-License-Identifier: Apache-2.0

// What the attention kernels share: a worker's walk over its pieces, the way from partial results
// to the output, and the addresses of both. plan.cuh explains row, unit and piece.
//
//   segment  consecutive pieces of one unit that one worker folds into one result: with automatic
//            splits all pieces of the unit in the worker's range, with fixed splits one piece.
//
// A unit that is one segment is written to the output at once. Else each segment leaves (m, l, O)
// in its slot; whoever arrives last at the unit's counter adds the slots in the order of the
// pieces. Bits therefore depend on the plan, never on the order in which CTAs run, and no CTA ever
// waits for another. A sink enters where an output is written, so once, however a unit was split.

#ifndef JAX_PAGED_CUDA_ATTENTION_SEGMENT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_SEGMENT_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/logits.cuh"
#include "cuda/attention/tree.cuh"
#include "cuda/codes.cuh"
#include "cuda/prim.h"
#include "cuda/warp_search.cuh"

namespace jax_paged::cuda {

// The positions of one worker.
struct WorkRange {
  int64_t begin;
  int64_t end;
  int64_t chunk;
};

JAX_PAGED_DEVICE WorkRange MyRange(const AttentionArgs& args) {
  const PlanHeader header = prim::LoadL2(args.header);
  WorkRange range;
  range.chunk = header.chunk;
  range.begin = prim::BlockIndex() / args.heads_together * header.chunk;
  range.end = range.begin + header.chunk;
  if (range.end > header.num_positions) range.end = header.num_positions;
  if (!HasLayer(args)) range.end = range.begin;
  return range;
}

struct Segment {
  int64_t position;  // of its first piece
  int32_t row;
  int32_t unit;        // of those of the row that this worker's team has: block of heads, tile
  int32_t piece;       // of the unit
  int32_t num_pieces;  // in this segment
  int32_t first_tile;  // of those that are not in the row's gap (FindGap)
  int32_t num_tiles;
  int32_t first_key;  // tokens of the row before it are left of every window, and not read unless
                      // they are pinned
  int32_t tree_size;  // of the row, where that is no chain
  RowLengths lengths;
  RowSplits splits;

  JAX_PAGED_DEVICE RowTree Tree() const { return {row, lengths.seq_len - tree_size, tree_size}; }
};

// TREES_AND_PINS: whether the kernel takes rows with a tree or pinned tokens (DecodeTraits).
template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE void LoadRow(const AttentionArgs& args, Segment* segment) {
  segment->lengths = prim::LoadConst<RowLengths>(args.row_lengths + segment->row);
  segment->splits = prim::LoadConst<RowSplits>(args.row_splits + segment->row);
  segment->tree_size = TREES_AND_PINS && args.max_tree > 0
                           ? prim::LoadConst<int32_t>(args.row_trees + segment->row)
                           : 0;
  segment->first_key =
      RowFirstKey<TREES_AND_PINS>(args, segment->row, segment->lengths, segment->tree_size);
}

// The first token of a segment's tile.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE int32_t TileToken(const AttentionArgs& args, const Segment& segment,
                                   int32_t tile) {
  tile += segment.first_tile;
  if (TREES_AND_PINS && args.num_pinned) {
    const TileGap gap = FindGap(args, segment.row, segment.first_key);
    if (tile >= gap.begin) tile += gap.size;
  }
  return tile * kTileTokens;
}

// Where the stored token at `token` stands in the sequence.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE int32_t TokenAt(const AttentionArgs& args, const Segment& segment, int32_t token) {
  if (!TREES_AND_PINS) return token;
  return PositionOf(args, segment.Tree(), token) + SlidBy(args, segment.row, token);
}

// Whether the tables of rope, where there are any, reach a position in the sequence. Queries and
// keys elsewhere are masked.
JAX_PAGED_DEVICE bool HasAngle(const AttentionArgs& args, int32_t position) {
  return !args.cos || (position >= 0 && position < args.max_positions);
}

// Whether those tables reach all queries of a row.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE bool AllHaveAngles(const AttentionArgs& args, const Segment& segment) {
  if (!args.cos) return true;
  const int32_t last = segment.lengths.seq_len - 1;  // where no node of a tree stands behind it
  return QueryPosition(segment.lengths, 0) >= 0 &&
         HasAngle(args, TREES_AND_PINS ? last + SlidBy(args, segment.row, last) : last);
}

// The id of a row's page.
JAX_PAGED_DEVICE int32_t PageOf(const AttentionArgs& args, int32_t row, int32_t index) {
  const int32_t behind = args.is_run ? index : 0;  // how far from the page that is listed
  const int32_t listed =
      prim::LoadConst(args.page_table + (row * args.table_width + (index - behind)));
  return static_cast<int32_t>(static_cast<uint32_t>(listed) + static_cast<uint32_t>(behind));
}

// Whether some query of a segment may see the stored token at `token`.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE bool IsRead(const AttentionArgs& args, const Segment& segment, int32_t token) {
  if (token >= segment.lengths.seq_len) return false;
  if (args.cos && !HasAngle(args, TokenAt<TREES_AND_PINS>(args, segment, token))) return false;
  return token >= segment.first_key ||
         (TREES_AND_PINS && args.num_pinned && token < NumPinned(args, segment.row));
}

template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE void ShapeSegment(const AttentionArgs& args, const WorkRange& range,
                                   Segment* segment) {
  const int64_t here = range.end - segment->position;
  const int32_t rest = segment->splits.num_pieces - segment->piece;
  segment->num_pieces =
      args.has_fixed_splits() ? 1 : (here < rest ? static_cast<int32_t>(here) : rest);
  const int32_t piece_tiles = segment->splits.PieceTiles(args.has_fixed_splits());
  const int32_t unit_tiles = CeilDiv<int32_t>(segment->lengths.seq_len, kTileTokens);
  segment->first_tile = segment->piece * piece_tiles;
  int32_t rest_tiles = unit_tiles - segment->first_tile;
  if (TREES_AND_PINS && args.num_pinned) {
    rest_tiles -= FindGap(args, segment->row, segment->first_key).size;
  } else {
    const int32_t left = segment->first_key / kTileTokens;
    segment->first_tile += left;
    rest_tiles -= left;
  }
  const int32_t tiles = segment->num_pieces * piece_tiles;
  segment->num_tiles = tiles < rest_tiles ? tiles : rest_tiles;
  // Windows or pins may be others than the plan's: a tile of nothing then, so that the loads and
  // the sums of a warp stay in step.
  if (segment->num_tiles < 1) segment->num_tiles = 1;
}

JAX_PAGED_DEVICE int32_t PositionsPerUnit(const AttentionArgs& args, const Segment& segment) {
  return segment.splits.Positions(args.has_fixed_splits());
}

// From anywhere in a unit to the next unit's first piece; false if the range ends before it.
template <bool TREES_AND_PINS>
JAX_PAGED_DEVICE bool NextUnit(const AttentionArgs& args, const WorkRange& range,
                               Segment* segment) {
  segment->position += PositionsPerUnit(args, *segment) - segment->piece;
  if (segment->position >= range.end) return false;
  segment->piece = 0;
  if (++segment->unit == segment->lengths.num_units / args.heads_together) {
    segment->unit = 0;
    do {
      ++segment->row;
      LoadRow<TREES_AND_PINS>(args, segment);
    } while (segment->lengths.num_units == 0);
  }
  return true;
}

// The first segment of a range that is not empty; false if it has no piece. Each warp looks for its
// row.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE bool FirstSegment(const AttentionArgs& args, const WorkRange& range,
                                   Segment* segment) {
  segment->position = range.begin;
  segment->row = WarpSearch(args.max_seqs, [&](int32_t row) {
    return prim::LoadConst<int64_t>(args.first_position + row) <= range.begin;
  });
  LoadRow<TREES_AND_PINS>(args, segment);
  const int64_t within = range.begin - prim::LoadConst<int64_t>(args.first_position + segment->row);
  const int64_t positions = PositionsPerUnit(args, *segment);
  segment->unit = static_cast<int32_t>(within / positions);
  segment->piece = static_cast<int32_t>(within - segment->unit * positions);
  if (segment->piece >= segment->splits.num_pieces &&
      !NextUnit<TREES_AND_PINS>(args, range, segment)) {
    return false;
  }
  ShapeSegment<TREES_AND_PINS>(args, range, segment);
  return true;
}

// Moves on; false at the end of the range.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE bool NextSegment(const AttentionArgs& args, const WorkRange& range,
                                  Segment* segment) {
  segment->position += segment->num_pieces;
  segment->piece += segment->num_pieces;
  if (segment->piece == segment->splits.num_pieces) {
    if (!NextUnit<TREES_AND_PINS>(args, range, segment)) return false;
  } else if (segment->position >= range.end) {
    return false;
  }
  ShapeSegment<TREES_AND_PINS>(args, range, segment);
  return true;
}

// The packed rows of a segment's unit.
struct UnitRows {
  int32_t kv_head;
  int32_t first;  // packed row
  int32_t count;  // at most ROWS
};

// ROWS, here and below: args.unit_rows, as the kernel knows it.
template <int ROWS = kTileRows>
JAX_PAGED_DEVICE UnitRows RowsOf(const AttentionArgs& args, const Segment& segment) {
  const int32_t tiles = segment.lengths.Tiles(args.num_kv_heads);
  const int32_t block = segment.unit / tiles;
  UnitRows rows;
  // Not kept from one segment to the next, for want of registers.
  const int32_t worker = prim::Opaque(prim::BlockIndex());
  rows.kv_head = block * args.heads_together + worker % args.heads_together;
  rows.first = (segment.unit - block * tiles) * ROWS;
  const int32_t rest = segment.lengths.q_len * args.group_size - rows.first;
  rows.count = rest < ROWS ? rest : ROWS;
  return rows;
}

// Query head of a packed row.
JAX_PAGED_DEVICE int32_t QueryHead(const AttentionArgs& args, const UnitRows& rows, int32_t row) {
  const int32_t packed = rows.first + row;
  const int32_t query = args.by_group_size(packed);
  return rows.kv_head * args.group_size + packed - query * args.group_size;
}

// Token of q and head of a packed row, as the index of a head in [num_tokens, num_q_heads].
JAX_PAGED_DEVICE int64_t HeadIndex(const AttentionArgs& args, const Segment& segment,
                                   const UnitRows& rows, int32_t row) {
  const int32_t packed = rows.first + row;
  const int32_t query = args.by_group_size(packed);
  const int32_t head = rows.kv_head * args.group_size + packed - query * args.group_size;
  return int64_t{segment.lengths.q_begin + query} * args.num_q_heads + head;
}

// Keys [first, end) of a row.
struct KeyRange {
  int32_t first;
  int32_t end;

  JAX_PAGED_DEVICE bool Contains(int32_t key) const {
    return static_cast<uint32_t>(key - first) < static_cast<uint32_t>(end - first);
  }
};

// The keys that a packed row sees beside pinned ones, of those of its tree at least what it sees
// (SeesKey tells); none for rows beyond the unit's. Without a tree both ends ascend with the row.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE KeyRange VisibleKeys(const AttentionArgs& args, const Segment& segment,
                                      const UnitRows& rows, int32_t row) {
  if (row >= rows.count) return {0, 0};
  const int32_t position = QueryPosition(segment.lengths, args.by_group_size(rows.first + row));
  KeyRange keys = {0, segment.lengths.seq_len};
  if (segment.tree_size > 0 && args.sliding_window) {
    const RowTree tree = segment.Tree();
    keys.first = FirstKey(args, segment.row, PositionOf(args, tree, position));
    if (tree.NodeOf(position) >= 0 && keys.first > tree.root) keys.first = tree.root;
  } else {
    keys.first = FirstKey<TREES_AND_PINS>(args, segment.row, position);
  }
  if (args.causal) keys.end = position < 0 ? 0 : position + 1;
  return keys;
}

// Where the query of a packed row stands in the sequence.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE int32_t QueryToken(const AttentionArgs& args, const Segment& segment,
                                    const UnitRows& rows, int32_t row) {
  return TokenAt<TREES_AND_PINS>(
      args, segment, QueryPosition(segment.lengths, args.by_group_size(rows.first + row)));
}

// VisibleKeys; none, if the tables of rope do not reach the query.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE KeyRange SeenKeys(const AttentionArgs& args, const Segment& segment,
                                   const UnitRows& rows, int32_t row) {
  const KeyRange keys = VisibleKeys<TREES_AND_PINS>(args, segment, rows, row);
  if (!args.cos || row >= rows.count) return keys;
  const bool has_angle = HasAngle(args, QueryToken<TREES_AND_PINS>(args, segment, rows, row));
  return has_angle ? keys : KeyRange{0, 0};
}

// Whether a packed row that sees `keys` beside pinned ones sees a key.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE bool Sees(const AttentionArgs& args, const Segment& segment, const KeyRange& keys,
                           int32_t key) {
  return keys.Contains(key) || (TREES_AND_PINS && args.num_pinned && key < keys.end &&
                                key < NumPinned(args, segment.row));
}

// s[n][2 half + i], the products of a packed row with keys `first_key` + 8 n + i, become logits.
template <bool TREES_AND_PINS = true, int N>
JAX_PAGED_DEVICE void EditLogits(const AttentionArgs& args, const Segment& segment,
                                 const UnitRows& rows, int32_t row, int32_t half, int32_t first_key,
                                 float (&s)[N][4]) {
  const LogitEdit edit = LoadEdit(args, row < rows.count ? QueryHead(args, rows, row) : 0);
  int32_t position = QueryPosition(segment.lengths, args.by_group_size(rows.first + row));
  if (args.logits.alibi_slopes && (segment.tree_size > 0 || (TREES_AND_PINS && args.num_pinned))) {
    position = TokenAt(args, segment, position);
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < N; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        float& x = s[n][2 * half + i];
        x = edit(x, static_cast<float>(TokenAt(args, segment, first_key + 8 * n + i) - position));
      }
    }
    return;
  }
  const float distance = static_cast<float>(first_key - position);
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < N; ++n) {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      float& x = s[n][2 * half + i];
      x = edit(x, distance + static_cast<float>(8 * n + i));
    }
  }
}

// Where the scale of a stored token and a KV head stands among those per token.
JAX_PAGED_DEVICE int64_t ScaleIndex(const AttentionArgs& args, int64_t layer, int32_t page,
                                    int32_t kv_head, int32_t slot) {
  return ((layer * args.num_pages + page) * args.num_kv_heads + kv_head) * args.page_size + slot;
}

// From the pool's first byte to the layer's.
JAX_PAGED_DEVICE int64_t LayerOffset(const AttentionArgs& args, const PageStrides& strides) {
  return prim::LoadConst(args.layer) * strides.layer;
}
JAX_PAGED_DEVICE Global<const char> LayerPages(const AttentionArgs& args, Global<const char> pages,
                                               const PageStrides& strides) {
  return pages + LayerOffset(args, strides);
}

// Where a segment's result goes.
struct Destination {
  bool is_output;      // the segment is the whole unit
  int32_t segments;    // of the unit
  int64_t slot;        // of this segment
  int64_t first_slot;  // of the unit's first segment; its arrival counter is the unit's

  // Between the slots of a unit's first two segments, and of any other two.
  JAX_PAGED_DEVICE static int32_t FirstStep(const AttentionArgs& args) {
    return args.has_fixed_splits() ? 1 : Step(args) - 1;
  }
  JAX_PAGED_DEVICE static int32_t Step(const AttentionArgs& args) {
    return args.has_fixed_splits() ? 1 : 2 * args.heads_together;
  }
  // The slot of the unit's segment `i`.
  JAX_PAGED_DEVICE int64_t SlotOf(const AttentionArgs& args, int32_t i) const {
    return i == 0 ? first_slot : first_slot + FirstStep(args) + int64_t{i - 1} * Step(args);
  }
};

JAX_PAGED_DEVICE Destination DestinationOf(const AttentionArgs& args, const WorkRange& range,
                                           const Segment& segment, const UnitRows& rows) {
  Destination to;
  if (args.has_fixed_splits()) {
    to.segments = segment.splits.num_pieces;
    to.is_output = to.segments == 1;
    const int32_t tiles = segment.lengths.Tiles(args.num_kv_heads);
    const int64_t unit = int64_t{rows.kv_head} * tiles + segment.unit % tiles;
    // Not segment.splits', which would keep registers for it where splits are automatic.
    const int64_t row_slot = prim::LoadL2<RowSplits>(args.row_splits + segment.row).first_slot;
    to.first_slot = row_slot + unit * segment.splits.num_pieces;
    to.slot = to.first_slot + segment.piece;
    return to;
  }
  // Worker w has slot 2w for a unit that began with an earlier team, 2w + 1 for one that begins
  // here.
  const int64_t begin = segment.position - segment.piece;
  const int64_t end = begin + segment.splits.num_pieces;
  to.is_output = begin >= range.begin && end <= range.end;
  to.segments = 1;
  to.slot = to.first_slot = 0;
  if (!to.is_output) {
    const int64_t first_team = begin / range.chunk;
    const int64_t last_team = (end - 1) / range.chunk;
    const int64_t first_worker =
        first_team * args.heads_together + rows.kv_head % args.heads_together;
    to.segments = static_cast<int32_t>(last_team - first_team) + 1;
    to.first_slot = 2 * first_worker + 1;
    to.slot = 2 * prim::BlockIndex() + (begin >= range.begin ? 1 : 0);
  }
  return to;
}

// Four columns of O.
template <int ROWS>
JAX_PAGED_DEVICE Global<Float4> SlotOut(const AttentionArgs& args, int64_t slot, int32_t row,
                                        int32_t column) {
  const int64_t at = (slot * ROWS + row) * args.v_head_dim + column;
  return (args.partial_out + at).As<Float4>();
}
template <int ROWS>
JAX_PAGED_DEVICE Global<Float2> SlotMl(const AttentionArgs& args, int64_t slot, int32_t row) {
  return args.partial_ml.As<Float2>() + (slot * ROWS + row);
}

// Writes one packed row, whose largest logit (log2) is m and whose weights' sum is l: to the
// output, or to a segment's slot.
template <typename T, int ROWS = kTileRows>
class RowWriter {
 public:
  // To the output; `with_lse`: that of the row's lse is written, too.
  JAX_PAGED_DEVICE RowWriter(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, int32_t row, float m, float l, bool with_lse)
      : is_output_(true), has_keys_(l != 0.0f) {
    const int64_t head_index = HeadIndex(args, segment, rows, row);
    const SoftmaxEnd end = EndSoftmax(m, l, LoadSink(args, QueryHead(args, rows, row)));
    factor_ = end.factor;
    to_ = args.out + head_index * args.v_head_dim * args.out_bytes;
    if (with_lse) prim::Store(args.lse + head_index, end.lse);
  }
  // To where the segment's result goes; `with_ml`: m and l are written, too.
  JAX_PAGED_DEVICE RowWriter(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const Destination& to, int32_t row, float m,
                             float l, bool with_ml)
      : RowWriter(args, segment, rows, row, m, l, to.is_output && with_ml) {
    if (to.is_output) return;
    is_output_ = false;
    to_ = SlotOut<ROWS>(args, to.slot, row, 0).template As<char>();
    if (with_ml) prim::Store(SlotMl<ROWS>(args, to.slot, row), Float2{m, l});
  }

  // Four columns, from their sums.
  JAX_PAGED_DEVICE void Write(const AttentionArgs& args, int32_t column, const Float4& sum) const {
    if (!is_output_) {
      prim::Store((to_ + column * 4).template As<Float4>(), sum);
      return;
    }
    const Float4 x =
        has_keys_ ? Float4{sum.x * factor_, sum.y * factor_, sum.z * factor_, sum.w * factor_}
                  : Float4{0, 0, 0, 0};
    const Global<char> out = to_ + column * args.out_bytes;
    if (args.out_bytes == 1) {  // fp8
      prim::Store(out.As<uint32_t>(), Fp8Quad(args.out_dtype, x, OutScale(args)));
    } else if constexpr (sizeof(T) == 4) {
      prim::Store(out.As<Float4>(), x);
    } else {
      prim::Store(out.As<Word2>(), Word2{prim::PackPair<T>(x.x, x.y), prim::PackPair<T>(x.z, x.w)});
    }
  }

 private:
  Global<char> to_;
  float factor_;
  bool is_output_;
  bool has_keys_;
};

// Partial results of a unit whose loads are on their way at once: nothing else hides their latency.
inline constexpr int32_t kMergedTogether = 8;

// Shared memory of MergeIfLast.
template <int THREADS = kAttentionThreads>
struct MergeShared {
  float tops[THREADS];
  uint32_t is_last;
};

// After the RowWriters of all THREADS of the CTA: the last segment to come here adds up all of the
// unit's.
template <typename T, int ROWS = kTileRows, int THREADS = kAttentionThreads>
JAX_PAGED_DEVICE void MergeIfLast(const AttentionArgs& args, const Segment& segment,
                                  const UnitRows& rows, const Destination& to,
                                  Shared<char> shared) {
  if (to.is_output) return;
  const int32_t thread = prim::ThreadIndex();
  const Shared<float> tops = (shared + offsetof(MergeShared<THREADS>, tops)).template As<float>();
  const Shared<uint32_t> is_last =
      (shared + offsetof(MergeShared<THREADS>, is_last)).template As<uint32_t>();
  prim::SyncThreads();
  if (thread == 0) {
    prim::ThreadFence();  // of all threads' results, which the barrier has shown to this one
    // Counts to segments - 1 and then wraps to 0.
    const uint32_t limit = static_cast<uint32_t>(to.segments - 1);
    const uint32_t before = prim::AtomicIncrement(args.arrivals + to.first_slot, limit);
    prim::ThreadFence();
    prim::Store(is_last, before == limit ? 1u : 0u);
  }
  prim::SyncThreads();
  if (!prim::Load(is_last)) return;

  constexpr int32_t kParts = THREADS / ROWS;
  float top = kNegativeInfinity;
  if (thread % ROWS < rows.count) {
    JAX_PAGED_UNROLL_4
    for (int32_t i = thread / ROWS; i < to.segments; i += kParts) {
      top = prim::Max(top, prim::LoadL2(SlotMl<ROWS>(args, to.SlotOf(args, i), thread % ROWS)).x);
    }
  }
  prim::Store(tops + thread, top);
  prim::SyncThreads();
  const int32_t row_quads = args.v_head_dim / 4;
  for (int32_t item = thread; item < rows.count * row_quads; item += THREADS) {
    const int32_t row = item / row_quads;
    const int32_t column = (item - row * row_quads) * 4;
    float m = kNegativeInfinity;
    for (int32_t part = 0; part < kParts; ++part) {
      m = prim::Max(m, prim::Load(tops + (part * ROWS + row)));
    }
    Float4 sum = {0, 0, 0, 0};
    float l = 0;
    const auto add = [&](const Float2& ml, const Float4& part) {
      const float factor = prim::Exp2(ml.x - Base(m));
      l = prim::Fma(ml.y, factor, l);
      sum.x = prim::Fma(part.x, factor, sum.x);
      sum.y = prim::Fma(part.y, factor, sum.y);
      sum.z = prim::Fma(part.z, factor, sum.z);
      sum.w = prim::Fma(part.w, factor, sum.w);
    };
    Global<Float2> ml = SlotMl<ROWS>(args, to.first_slot, row);
    Global<Float4> part = SlotOut<ROWS>(args, to.first_slot, row, column);
    int32_t step = to.FirstStep(args) * ROWS;
    for (int32_t rest = to.segments; rest > 0; rest -= kMergedTogether) {
      Float2 mls[kMergedTogether];
      Float4 parts[kMergedTogether];
      JAX_PAGED_UNROLL
      for (int32_t j = 0; j < kMergedTogether; ++j) {
        mls[j] = prim::LoadL2(ml);  // behind the last one, that one again
        parts[j] = prim::LoadL2(part);
        if (j + 1 < rest) {
          ml = ml + step;
          part = part + step * row_quads;
        }
        step = to.Step(args) * ROWS;
      }
      JAX_PAGED_UNROLL
      for (int32_t j = 0; j < kMergedTogether; ++j) {
        if (j < rest) add(mls[j], parts[j]);
      }
    }
    RowWriter<T>(args, segment, rows, row, m, l, /*with_lse=*/column == 0).Write(args, column, sum);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_SEGMENT_CUH_
