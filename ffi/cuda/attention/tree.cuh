// SPDX-License-Identifier: Apache-2.0

// Token trees: the last stored tokens of a row, each with its interval in depth-first order
// (common/tree.h says what is seen). Intervals are read where they are needed, by the masked tiles
// at the end of a row; the planner leaves which rows have a tree that is no chain, and, where
// windows or ALiBi ask for positions, the depth of each node.

#ifndef JAX_PAGED_CUDA_ATTENTION_TREE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_TREE_CUH_

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/logits.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// A row's tree: stored tokens [root, root + size); size 0: none.
struct RowTree {
  int32_t row;
  int32_t root;
  int32_t size;

  // The node that stored token `token` is, or a negative number.
  JAX_PAGED_DEVICE int32_t NodeOf(int32_t token) const {
    return token < root + size ? token - root : -1;
  }
};

// The interval of a node, clamped to a tree of `size` nodes.
JAX_PAGED_DEVICE TreeInterval LoadInterval(const AttentionArgs& args, int32_t row, int32_t size,
                                           int32_t node) {
  const TreeInterval found =
      prim::LoadConst<TreeInterval>(args.tree + (int64_t{row} * args.max_tree + node));
  return {Clamp<int32_t>(found.first, 0, size), Clamp<int32_t>(found.end, 0, size)};
}

// Whether the subtree of a node holds the place of another.
JAX_PAGED_DEVICE bool Holds(const TreeInterval& node, int32_t place) {
  return node.first <= place && place < node.end;
}

// Whether where a token stands matters, beside what it sees.
JAX_PAGED_DEVICE bool UsesPositions(const AttentionArgs& args) {
  return args.sliding_window || args.logits.alibi_slopes || args.cos;
}

// Where a stored token stands: its place, or in a tree its depth behind the place of the tree. Only
// where positions are used.
JAX_PAGED_DEVICE int32_t PositionOf(const AttentionArgs& args, const RowTree& tree, int32_t token) {
  const int32_t node = tree.NodeOf(token);
  if (node < 0) return token;
  const int64_t at = int64_t{tree.row} * args.max_tree + node;
  return tree.root + prim::LoadConst<int32_t>(args.depths + at);
}

// First key in the window of any query of a row: of its first one, or of a root of its tree.
template <bool TREES_AND_PINS = true>
JAX_PAGED_DEVICE int32_t RowFirstKey(const AttentionArgs& args, int32_t row,
                                     const RowLengths& lengths, int32_t tree_size) {
  const int32_t first = QueryPosition(lengths, /*query=*/0);
  const int32_t root = lengths.seq_len - tree_size;
  return FirstKey<TREES_AND_PINS>(args, row, tree_size > 0 && first > root ? root : first);
}

// Tiles of a row that hold pinned tokens and lie before those of its windows; between the two are
// tiles that no query sees. Rows without a window have none.
struct TileGap {
  int32_t begin;  // tiles before the gap
  int32_t size;
};

template <int TILE_TOKENS = kTileTokens>
JAX_PAGED_DEVICE TileGap FindGap(const AttentionArgs& args, int32_t row, int32_t first_key) {
  const int32_t window_tile = first_key / TILE_TOKENS;
  const int32_t pinned = NumPinned(args, row);
  // In tiles, and no more than there are before the window: pinned may be anything.
  int32_t begin = pinned / TILE_TOKENS + (pinned % TILE_TOKENS != 0);
  if (begin > window_tile) begin = window_tile;
  return {begin, window_tile - begin};
}

// A query of a row with a tree.
struct TreeQuery {
  int32_t node;     // negative: stored before the tree
  int32_t place;    // in depth-first order
  int32_t nearest;  // least depth within its window
};

JAX_PAGED_DEVICE TreeQuery FindQuery(const AttentionArgs& args, const RowTree& tree,
                                     int32_t token) {
  TreeQuery query = {tree.NodeOf(token), 0, 0};
  if (query.node < 0) return query;
  query.place = LoadInterval(args, tree.row, tree.size, query.node).first;
  if (args.sliding_window) {
    query.nearest = FirstKey(args, tree.row, PositionOf(args, tree, token)) - tree.root;
  }
  return query;
}

// Whether a query sees a key that is stored no later; keys before the tree are not its business.
JAX_PAGED_DEVICE bool SeesKey(const AttentionArgs& args, const RowTree& tree,
                              const TreeQuery& query, int32_t key) {
  const int32_t node = tree.NodeOf(key);
  if (query.node < 0 || node < 0) return true;
  if (!Holds(LoadInterval(args, tree.row, tree.size, node), query.place)) return false;
  return query.nearest <= 0 || PositionOf(args, tree, key) - tree.root >= query.nearest ||
         key < NumPinned(args, tree.row);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_TREE_CUH_
