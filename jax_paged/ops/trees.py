# SPDX-License-Identifier: Apache-2.0
"""Token trees for speculative decoding: from parent pointers to what attention masks with.

A row's tree is a list of nodes, each stored behind its parent. In depth-first order, children in
the order in which they are stored, the subtree of a node takes places next to each other: the
interval [first, end), where first is the node's own place. So one node is an ancestor of another,
or the same, just when its interval holds the other's place.

Everything here is whole-array work in about log2(max_tree) rounds, on the device, without a loop
over nodes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_paged.checks import as_index, check_shape, expect
from jax_paged.checks.status import Status, code


def tree_intervals(
    parents: Int[Array, "num_seqs max_tree"], tree_sizes: Int[Array, "num_seqs"]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The intervals of trees in depth-first order, from the parents of their nodes.

    Args:
      parents: [num_seqs, max_tree]: the parent of each node, −1 for a root (there may be several);
        a parent comes before its children: −1 ≤ parents[r, i] < i. Entries from tree_sizes[r] on
        are not read.
      tree_sizes: [num_seqs]: nodes of each row, 0 to max_tree.

    Returns:
      (tree i32[num_seqs, max_tree, 2], depths i32[num_seqs, max_tree], status i32[num_seqs]). tree:
      first and end of each node, as `ragged_paged_attention` takes them. depths: the number of
      ancestors of each node. Both are 0 behind the tree. status: `Status`; BAD_ROW where a
      parent or a size is none: then the row is given as a row of roots, of size 0 or max_tree where
      the size is out of range.

    Raises:
      ValueError: a shape or dtype is wrong.

    The intervals are those of TVM's paged KV cache; the sums over paths are made by pointer
    jumping (Wyllie 1979).

    >>> import jax.numpy as jnp
    >>> parents = jnp.array([[-1, 0, 0, 1]])  # 0 has the children 1 and 2, and 1 has 3
    >>> tree, depths, status = tree_intervals(parents, jnp.array([4]))
    >>> print(tree[0].tolist(), depths[0], status)
    [[0, 4], [1, 3], [3, 4], [2, 3]] [0 1 1 2] [0]
    """
    parents, tree_sizes = as_index("parents", parents), as_index("tree_sizes", tree_sizes)
    check_shape("parents", parents, "num_seqs max_tree", (None, None))
    expect(parents.shape[1] >= 1, "parents", "max_tree >= 1", 0)
    check_shape("tree_sizes", tree_sizes, "num_seqs", (parents.shape[0],))
    return _tree_intervals(parents, tree_sizes)


@jax.jit
def _tree_intervals(parents, tree_sizes):
    max_tree = parents.shape[1]
    node = jnp.arange(max_tree, dtype=jnp.int32)[None]
    sizes = jnp.clip(tree_sizes, 0, max_tree)[:, None]
    live = node < sizes
    wrong = jnp.any(live & ((parents < -1) | (parents >= node)), axis=1)
    bad = wrong | (tree_sizes < 0) | (tree_sizes > max_tree)
    parents = jnp.where(wrong[:, None], -1, parents)
    status = jnp.where(bad, code(Status.BAD_ROW), code(Status.OK))
    return *intervals_of(parents, sizes[:, 0]), status


def intervals_of(parents: jax.Array, tree_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`tree_intervals` of trees that are known to be right."""
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)[None]
    live = node < tree_sizes[:, None]
    parents = jnp.where(live, parents, -1)
    num_nodes = _subtree_sizes(parents, live)
    # A node stands one behind its parent, and behind the subtrees of its earlier siblings; a root
    # behind those of the earlier roots.
    earlier = (parents[:, :, None] == parents[:, None, :]) & (node[:, None, :] < node[..., None])
    before = jnp.sum(jnp.where(earlier, num_nodes[:, None, :], 0), axis=2, dtype=jnp.int32)
    is_child = (parents >= 0).astype(jnp.int32)
    depths = _sum_over_path(is_child, parents)
    first = jnp.where(live, _sum_over_path(before + is_child, parents), 0)
    end = jnp.where(live, first + num_nodes, 0)
    return jnp.stack([first, end], axis=-1), depths


def _jumps(parents: jax.Array) -> int:
    """Doubling jumps after which every path to a root has ended."""
    return max(1, (parents.shape[1] - 1).bit_length())


def _jump(values: jax.Array, pointers: jax.Array, at_end: int) -> jax.Array:
    """values[pointers] of each row; at_end where a path has ended, pointers being -1."""
    found = jnp.take_along_axis(values, jnp.maximum(pointers, 0), axis=1)
    return jnp.where(pointers < 0, at_end, found)


def _sum_over_path(values: jax.Array, parents: jax.Array) -> jax.Array:
    """The sum of values over each node and its ancestors."""

    def jump(_, carry):  # total: over the next 2^round nodes of the path
        total, pointers = carry
        return total + _jump(total, pointers, 0), _jump(pointers, pointers, -1)

    return jax.lax.fori_loop(0, _jumps(parents), jump, (values, parents))[0]


def _subtree_sizes(parents: jax.Array, live: jax.Array) -> jax.Array:
    """The number of nodes in the subtree of each node."""
    rows, max_tree = parents.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def jump(_, carry):  # count: of the descendants less than 2^round below
        count, pointers = carry
        index = jnp.where(pointers < 0, max_tree, pointers)
        count = count.at[row, index].add(count, mode="drop")
        return count, _jump(pointers, pointers, -1)

    return jax.lax.fori_loop(0, _jumps(parents), jump, (live.astype(jnp.int32), parents))[0]
