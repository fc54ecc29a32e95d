// SPDX-License-Identifier: Apache-2.0

// Token trees: the last stored tokens of a row, each with its interval in depth-first order.
//
// Node i has the interval [first, end) of the places that its subtree takes in depth-first order,
// first being its own. Query node i sees key node j when j is stored no later and first[j] <=
// first[i] < end[j]: j is an ancestor of i, or i itself. Its depth is the number of nodes stored
// before it that it sees; it stands at the length before the tree plus its depth.

#ifndef JAX_PAGED_COMMON_TREE_H_
#define JAX_PAGED_COMMON_TREE_H_

#include <cstdint>

#include "common/integers.h"
#include "common/params.h"
#include "common/schedule.h"

namespace jax_paged {

struct TreeView {
  const int32_t* first;  // [size]
  const int32_t* end;
  const int32_t* depth;  // only where positions count: with a window or edited logits

  // Whether query node i sees key node j.
  bool Sees(int64_t i, int64_t j) const {
    return j <= i && first[j] <= first[i] && first[i] < end[j];
  }
};

inline TreeView TreeOf(const AttentionParams& params, int32_t row) {
  const int32_t* tree = params.trees + row * 3 * params.max_tree;
  return {tree, tree + params.max_tree, tree + 2 * params.max_tree};
}

// Reads the tree of `size` nodes that nobody has checked, intervals [size, 2], into tree [3,
// max_tree]: its intervals clamped to [0, size], and with `depths` the depths. Returns whether it
// hides anything: a chain, where each node sees all before it, is no tree to the kernels.
inline bool ReadTree(const int32_t* intervals, int32_t size, int64_t max_tree, bool depths,
                     int32_t* tree) {
  int32_t* first = tree;
  int32_t* end = tree + max_tree;
  int32_t* depth = tree + 2 * max_tree;
  int32_t latest = 0, earliest = size;  // first, and end, of the nodes so far
  bool is_chain = true;
  for (int32_t i = 0; i < size; ++i) {
    first[i] = static_cast<int32_t>(Clamp(intervals[2 * i], 0, size));
    end[i] = static_cast<int32_t>(Clamp(intervals[2 * i + 1], 0, size));
    if (first[i] > latest) latest = first[i];
    if (end[i] < earliest) earliest = end[i];
    is_chain &= first[i] == latest && first[i] < earliest;
  }
  if (is_chain) return false;
  for (int32_t i = 0; depths && i < size; ++i) {
    int32_t count = 0;
    for (int32_t j = 0; j < i; ++j) count += (first[j] <= first[i]) & (first[i] < end[j]);
    depth[i] = count;
  }
  return true;
}

// Where stored token `token` of a row stands among the stored ones: its place, or in a tree its
// depth behind the place of the tree.
inline int64_t PositionOf(const AttentionParams& params, const Row& row, int32_t row_index,
                          int64_t token) {
  const int64_t root = int64_t{row.seq_len} - row.tree_size;
  if (row.tree_size == 0 || token < root || token >= row.seq_len) return token;
  return root + TreeOf(params, row_index).depth[token - root];
}

// The same among all tokens of the sequence.
inline int64_t TokenAt(const AttentionParams& params, const Row& row, int32_t row_index,
                       int64_t token) {
  return PositionOf(params, row, row_index, token) + row.SlidBy(token);
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_TREE_H_
