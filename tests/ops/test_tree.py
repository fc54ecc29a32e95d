# SPDX-License-Identifier: Apache-2.0
"""Tree intervals from parent pointers, against a recursive walk in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_paged import Status, tree_intervals
from jax_paged.testing import ancestors

MAX_TREE = 13


def walk(parents: list[int]) -> tuple[list[list[int]], list[int]]:
    """Intervals and depths of a valid tree, node by node."""
    intervals, depths = [[0, 0] for _ in parents], [0] * len(parents)
    place = 0

    def visit(node: int, depth: int) -> None:
        nonlocal place
        intervals[node][0], depths[node] = place, depth
        place += 1
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                visit(child, depth + 1)
        intervals[node][1] = place

    for node, parent in enumerate(parents):
        if parent == -1:
            visit(node, 0)
    return intervals, depths


def is_valid(parents: list[int]) -> bool:
    return all(-1 <= parent < node for node, parent in enumerate(parents))


@st.composite
def rows(draw):
    """Some rows of parents, most of them valid, and what stands behind them."""
    found = []
    for _ in range(3):
        size = draw(st.integers(0, MAX_TREE))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        if size and draw(st.integers(0, 4)) == 0:
            wild = st.sampled_from([-2, size - 1, size, MAX_TREE, 2**31 - 1, -(2**31)])
            parents[draw(st.integers(0, size - 1))] = draw(wild)
        found.append(parents)
    return found


def padded(found: list[list[int]], fill: int = 99) -> np.ndarray:
    return np.array([x + [fill] * (MAX_TREE - len(x)) for x in found], np.int32)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(rows())
def test_intervals_are_those_of_a_walk(found):
    sizes = np.array([len(x) for x in found], np.int32)
    tree, depths, status = map(np.asarray, tree_intervals(padded(found), sizes))
    for row, parents in enumerate(found):
        n = len(parents)
        valid = is_valid(parents)
        assert status[row] == (Status.OK if valid else Status.BAD_ROW)
        intervals, expected = walk(parents if valid else [-1] * n)
        assert tree[row, :n].tolist() == intervals
        assert depths[row, :n].tolist() == expected
        assert not tree[row, n:].any()
        assert not depths[row, n:].any()
        if not valid:
            continue
        for node in range(n):
            path, up = {node}, parents[node]
            while up >= 0:
                path.add(up)
                up = parents[up]
            assert set(np.flatnonzero(ancestors(tree[row, :n])[node])) == path


@pytest.mark.parametrize("max_tree", [1, 2, 3, 64, 257])
def test_chains_stars_and_combs_of_any_size(max_tree):
    node = np.arange(max_tree)
    chain, star = node - 1, np.where(node == 0, -1, 0)
    comb = np.where(node % 2 == 0, node - 2, node - 1)  # a chain of even nodes, a leaf on each
    comb[0] = -1
    parents = np.stack([chain, star, np.full(max_tree, -1), comb])
    tree, depths, status = tree_intervals(parents, np.full(4, max_tree))
    assert not np.asarray(status).any()
    for row, found in enumerate(parents.tolist()):
        depth = [0] * max_tree
        sees = np.eye(max_tree, dtype=bool)
        for i, parent in enumerate(found):
            if parent >= 0:
                depth[i] = depth[parent] + 1
                sees[i] |= sees[parent]
        assert depths[row].tolist() == depth
        np.testing.assert_array_equal(ancestors(tree[row]), sees)


@pytest.mark.parametrize("size", [-1, MAX_TREE + 1, 2**31 - 1, -(2**31)])
def test_a_size_out_of_range_is_reported_and_clamped(size):
    parents = padded([list(range(-1, MAX_TREE - 1)), [-1, 0]])
    tree, _, status = tree_intervals(parents, np.array([size, 2]))
    assert status.tolist() == [Status.BAD_ROW, Status.OK]
    assert tree[1, :2].tolist() == [[0, 2], [1, 2]]
    assert ((tree >= 0) & (tree <= MAX_TREE)).all()


def test_it_is_one_program_without_a_loop_over_nodes():
    jitted = jax.jit(tree_intervals)
    parents = padded([[-1, 0, 0, 1]])
    np.testing.assert_array_equal(
        jitted(parents, jnp.array([4]))[0], tree_intervals(parents, np.array([4]))[0]
    )
    rounds = str(jax.make_jaxpr(tree_intervals)(np.zeros((2, 256), np.int64), np.zeros(2, "i4")))
    assert "length=8" in rounds
    assert "length=256" not in rounds


@pytest.mark.parametrize(
    ("parents", "sizes", "message"),
    [
        (np.zeros(3, "i4"), np.zeros(1, "i4"), "parents: expected shape"),
        (np.zeros((1, 0), "i4"), np.zeros(1, "i4"), "parents: expected max_tree >= 1, got 0"),
        (np.zeros((1, 3), "f4"), np.zeros(1, "i4"), "parents: expected an integer dtype"),
        (np.zeros((1, 3), "i4"), np.zeros(2, "i4"), "tree_sizes: expected shape"),
    ],
)
def test_wrong_arguments_are_told(parents, sizes, message):
    with pytest.raises(ValueError, match=message):
        tree_intervals(parents, sizes)
