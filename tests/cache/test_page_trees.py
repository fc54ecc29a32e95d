# SPDX-License-Identifier: Apache-2.0
"""Token trees from step to step: grown, read by the model, committed, and read again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import copies_and_selects, gathers_in_place
from kv_states import append, big_state, read
from kv_states import make as make_state
from page_tables import assert_reset, assert_same, grow, make
from steppers import NUM_TOKENS, ids, make_stepper

from jax_paged import NO_TREE, KVState, PageTable, Status, StepBatch, move_slots, write_kv
from jax_paged.layout import (
    LAYOUTS,
    PagesShape,
    is_one_pool,
    make_shape,
    pool_of_v,
    slots_first,
)

OK, BAD, STALE = Status.OK, Status.BAD_ROW, Status.STALE_ROW
FULL, OPEN = Status.ROW_FULL, Status.UNCOMMITTED_TREE


def plant(table: PageTable, rows, parents) -> tuple[PageTable, StepBatch]:
    """Rows with new nodes of those parents, behind what they have."""
    q_lens = [len(x) for x in parents]
    table, status = table.reserve(rows, q_lens)
    assert not any(status.tolist())
    flat = [parent for found in parents for parent in found]
    table, batch, status = table.step(rows, q_lens, num_tokens=len(flat), tree_parents=flat)
    assert not any(status.tolist())
    return table, batch


def test_rows_with_and_without_a_tree_in_one_step():
    table = grow(make(), [0, 1, 2], [3, 5, 2])
    table, batch = plant(table, [2, 0, 1], [[-1, 0, 0, 2, -1], [NO_TREE] * 2, [-1, 0]])
    assert batch.positions.tolist() == [2, 3, 3, 4, 2, 3, 4, 5, 6]
    assert batch.seq_lens.tolist() == [7, 5, 7]
    assert batch.tree_sizes.tolist() == [5, 0, 2]
    assert batch.tree[0, :5].tolist() == [[0, 4], [1, 2], [2, 4], [3, 4], [4, 5]]
    assert not batch.tree[1].any()
    assert table.tree_sizes.tolist() == [0, 2, 5, 0]
    # The slots go by what is stored, not by the depth.
    assert len(set(batch.slot_mapping.tolist())) == 9
    table, moves, status = table.commit_tree([1, -1, 2], [1, 7, 3])
    assert status.tolist() == [OK] * 3
    assert table.seq_lens.tolist() == [5, 7, 5, 0]
    assert np.sum(np.asarray(moves.src) >= 0) == 2  # nodes 2 and 3 of row 2; row 1 is a chain


def test_a_tree_is_settled_before_plain_tokens_truncate_and_fork():
    table = grow(make(), [0, 1], [3, 3])
    table, _ = plant(table, [1], [[-1, -1]])
    table, _ = table.reserve([0, 1], 2)
    step = functools.partial(PageTable.step, table, [0, 1], [1, 1], num_tokens=4)
    for after, _, status in (step(), step(tree_parents=[NO_TREE] * 4)):
        assert status.tolist() == [OK, OPEN]
        assert_same(after, table)
    assert table.step([0, 1], [1, 0], num_tokens=4)[2].tolist() == [OK, OK]
    for after, _, status in (
        table.truncate([1, 0], 0),
        table.fork([1, 0], [2, 3], 1),
    ):
        assert status.tolist() == [OPEN, OK]
        assert_same(after, table)
    table, _, status = table.commit_tree([1], [-1])
    assert status.tolist() == [OK]
    assert table.seq_lens.tolist() == [3, 3, 0, 0]
    assert table.step([0, 1], [1, 1], num_tokens=4)[2].tolist() == [OK, OK]


@pytest.mark.parametrize(
    ("parents", "status"),
    [
        ([-1, 0, 1, -1], [OK, OK]),
        ([-1, 1, -1, 0], [BAD, OK]),  # its own parent
        ([0, 0, -1, 0], [BAD, OK]),
        ([-3, -1, -1, 0], [BAD, OK]),
        ([-1, NO_TREE, -1, -1], [BAD, OK]),
        ([NO_TREE, 0, 2**40, -(2**40)], [BAD, BAD]),
        ([-1, 0, 1, 2], [OK, OK]),  # row 1 has two nodes already
        ([-1, 0, 2, 0], [OK, BAD]),
        ([-1, 0, 1, 4], [OK, BAD]),
        ([-1, 0, NO_TREE, NO_TREE], [OK, OPEN]),
    ],
)
def test_wrong_parents_are_reported_and_change_nothing(parents, status):
    table = grow(make(), [0, 1], [3, 3])
    table, _ = plant(table, [1], [[-1, 0]])
    table, _ = table.reserve([0, 1], 2)
    after, batch, got = table.step([0, 1], 2, num_tokens=4, tree_parents=np.array(parents))
    assert got.tolist() == status
    if any(status):
        assert_same(after, table)
        assert batch.slot_mapping.tolist() == [-1] * 4
        assert not np.asarray(batch.tree_sizes).any()
    else:
        assert after.tree_parents[1, 2:4].tolist() == parents[2:]


def test_a_tree_has_at_most_max_tree_nodes():
    table = PageTable.create(8, 2, 4, 4, max_tree=3)
    table, _ = plant(table, [0], [[-1, 0]])
    table, _ = table.reserve([0], 2)
    call = functools.partial(PageTable.step, table, [0])
    assert call([2], num_tokens=2, tree_parents=[0, 0])[2].tolist() == [FULL]
    table, batch, status = call([1], num_tokens=2, tree_parents=[1, 9])
    assert status.tolist() == [OK]
    assert batch.tree.shape == (1, 3, 2)
    assert batch.positions.tolist() == [2, 0]


def test_commit_takes_any_rows_once():
    table = grow(make(), [0, 1, 2], [3, 3, 3])
    table, _ = plant(table, [0, 2], [[-1, 0, 0], [-1, -1]])
    for rows, leaves, expected in (
        ([0, 2], [3, 0], [BAD, OK]),
        ([0, 2], [2, -2], [OK, BAD]),
        ([0, 1], [0, 0], [OK, BAD]),  # no tree
        ([0, 0], [0, 0], [BAD, BAD]),
        ([0, 3], [0, 0], [OK, STALE]),
        ([9, 2], [0, 0], [BAD, OK]),
        ([0, 2], [2**40, 0], [BAD, OK]),
    ):
        after, moves, status = table.commit_tree(rows, leaves)
        assert status.tolist() == expected
        assert_same(after, table)
        assert (moves.src == -1).all()
        assert (moves.dst == -1).all()
    table, _, status = table.commit_tree([2, 0], [1, -1])
    assert status.tolist() == [OK, OK]
    assert table.seq_lens.tolist() == [3, 3, 4, 0]
    assert table.commit_tree([2, 0], [-1, 0])[2].tolist() == [BAD, BAD]


def test_pages_of_an_open_tree_cannot_be_held():
    table = grow(make(), [0], [3])
    table, _ = plant(table, [0], [[-1, 0, 0, 0, 0]])
    assert table.hold([0], [0])[2].tolist() == [BAD]
    table, _, _ = table.commit_tree([0], [1])
    assert table.hold([0], [0])[2].tolist() == [OK]


def test_release_and_reset_forget_trees():
    table, _ = plant(PageTable.create(8, 2, 4, 4, max_tree=6), [0], [[-1, 0]])
    released, _ = table.release([0])
    assert not released.tree_sizes.any()
    assert_reset(table, PageTable.create(8, 2, 4, 4, max_tree=6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [0], "leaves": [0, 1]}, r"leaves: expected a scalar or shape \[1\], got \[2\]"),
        ({"rows": np.zeros(0, int), "leaves": 0}, r"rows: expected shape \[N\] with N of at"),
        ({"rows": [0], "leaves": [0.5]}, "leaves: expected an integer dtype"),
    ],
)
def test_wrong_arguments_of_commit_are_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        make().commit_tree(**arguments)
    with pytest.raises(ValueError, match=r"tree_parents: expected shape \[num_tokens=3\], got"):
        make().step([0], 0, num_tokens=3, tree_parents=[0, 1])
    with pytest.raises(ValueError, match="max_tree: expected an integer of at least 1, got 0"):
        PageTable.create(1, 1, 1, 1, max_tree=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_moves_the_path_in_every_layer(layout):
    kv = append(make_state(layout=layout), [0, 1], [3, 2], range(5))
    table, batch = plant(kv.table, [1, 0], [[-1, -1, 1, 1, 3], [-1, 0, 0, 2]])
    values = jnp.arange(100, 109, dtype=jnp.float32)[:, None, None]
    values = jnp.broadcast_to(values, (9, 2, 8))
    k_pages, v_pages = kv.k_pages, kv.v_pages
    for layer in range(2):
        k = values + np.float32(layer / 2)
        k_pages, v_pages = write_kv(
            k_pages, v_pages, k, -k, batch.slot_mapping, layer=layer, layout=layout
        )
    kv = kv.replace(k_pages=k_pages, v_pages=v_pages, table=table)
    kv, status = kv.commit_tree([0, 1], [3, 4])
    assert status.tolist() == [OK, OK]
    assert read(kv, 0) == [0, 1, 2, 105, 107, 108]
    assert read(kv, 1) == [3, 4, 101, 103, 104]
    kv = append(kv, [1], [1], [200])
    assert read(kv, 1) == [3, 4, 101, 103, 104, 200]


@gathers_in_place
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_commit_moves_tokens_in_place(dtype):
    kv, rows = big_state(dtype), jnp.zeros(2, jnp.int32)
    pool_bytes = kv.k_pages.size * kv.k_pages.dtype.itemsize
    compiled = jax.jit(KVState.commit_tree, donate_argnums=0).lower(kv, rows, rows).compile()
    assert copies_and_selects(compiled, kv.k_pages) == []
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < pool_bytes // 2
    assert memory.alias_size_in_bytes >= 2 * pool_bytes


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_move_slots_reads_all_before_it_writes(layout, dtype, implementation):
    rng = np.random.default_rng(0)
    for num_layers in (None, 2):
        shape = PagesShape(num_layers, 5, 2, 4, 16)
        pools = [
            jnp.asarray(
                rng.integers(-9, 9, make_shape(shape, layout, pool, dtype=jnp.dtype(dtype))), dtype
            )
            for pool in ("k", "v")
        ]
        if is_one_pool(layout):
            pools[1] = None
        both = pools[0], pool_of_v(*pools, layout)
        src = np.array([0, 1, 2, -1, 20, 7, 19, 2**31 - 1, 3])
        dst = np.array([1, 2, 0, 5, 6, -1, 7, 8, 20])
        expected = []
        for pages_, pool in zip(both, ("k", "v"), strict=True):
            flat = np.array(slots_first(pages_, layout, pool))  # [(layers,) pages, slots, ...]
            flat = flat.reshape(*flat.shape[: flat.ndim - 4], 20, *flat.shape[-2:])
            flat[..., [1, 2, 0, 7], :, :] = flat[..., [0, 1, 2, 19], :, :]
            expected.append(flat)
        moved = move_slots(
            *pools, src, dst, layout=layout,
            implementation=implementation,
        )  # fmt: skip
        moved = moved[0], pool_of_v(*moved, layout)
        for got, want, pool in zip(moved, expected, ("k", "v"), strict=True):
            np.testing.assert_array_equal(
                np.array(slots_first(got, layout, pool)).reshape(want.shape), want
            )


@pytest.mark.parametrize("stacked", [False, True])
def test_move_slots_takes_scales_of_tokens_along(stacked):
    rng = np.random.default_rng(0)
    layers = (2,) if stacked else ()
    pools = [jnp.asarray(rng.integers(-9, 9, (*layers, 3, 2, 4, 8)), jnp.int8) for _ in range(2)]
    scales = [rng.uniform(size=(*layers, 3, 2, 4)).astype("f4") for _ in range(2)]
    src, dst = np.array([1, 11, -1]), np.array([0, 6, 2])
    expected = [scale.copy() for scale in scales]
    for old, new in zip(scales, expected, strict=True):
        new[..., 0, :, 0] = old[..., 0, :, 1]
        new[..., 1, :, 2] = old[..., 2, :, 3]
    given = {"k_scale": jnp.asarray(scales[0]), "v_scale": jnp.asarray(scales[1])}
    plain = move_slots(*(jnp.array(x) for x in pools), src, dst)
    with pytest.raises(ValueError, match="v_scale: expected a scale per token, or None twice"):
        move_slots(*pools, src, dst, k_scale=given["k_scale"])
    with pytest.raises(ValueError, match="k_scale: expected a scale per token, or None twice"):
        move_slots(*pools, src, dst, **dict.fromkeys(given, jnp.float32(2)))
    *moved, k_scale, v_scale = move_slots(*pools, src, dst, **given)
    for a, b in zip(moved, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(k_scale, expected[0])
    np.testing.assert_array_equal(v_scale, expected[1])


PARENTS = [-1, 0, 0, 2, 1, -1, 5, 3, 2]


def path_of(node: int) -> list[int]:
    return [] if node == -1 else [*path_of(PARENTS[node]), node]


@pytest.mark.parametrize("steps", [[9], [1, 3, 9], [4, 5, 6, 9]], ids=str)
def test_each_node_has_the_logits_of_its_path_alone(steps):
    """A tree of nine in one row, plain tokens in another, a chain in the last one."""
    stepper, alone = make_stepper("qwen3"), make_stepper("qwen3")
    prompt, nodes, other = ids(7), ids(9, seed=1), ids(12, seed=2)
    stepper.step({2: prompt, 0: other[:3], 3: prompt[:2]}, padded_to=NUM_TOKENS)
    got = []
    for begin, end in zip([0, *steps[:-1]], steps, strict=True):
        tokens = {0: other[3 + begin : 3 + end], 2: nodes[begin:end]}
        parents = {2: PARENTS[begin:end]}
        if begin == 0:
            tokens[3], parents[3] = prompt[2:4], [-1, 0]
        out = stepper.step(tokens, padded_to=NUM_TOKENS + 4, parents=parents)
        got += list(out[2])
        if begin == 0:
            chain = out[3]
    for node in (3, 4, 6, 7, 8):
        path = path_of(node)
        expected = alone.step({0: prompt + [nodes[i] for i in path]}, padded_to=NUM_TOKENS)[0]
        np.testing.assert_allclose([got[i] for i in path], expected[7:], atol=2e-5)
        alone.state, _ = alone.state.release([0])
    expected = alone.step({0: prompt[:4]}, padded_to=NUM_TOKENS)[0]
    np.testing.assert_allclose(chain, expected[2:], atol=2e-5)

    # The accepted path is as if it had come by itself.
    stepper.state, status = stepper.state.commit_tree([3, 2], [1, 7])
    assert status.tolist() == [OK, OK]
    more = ids(2, seed=3)
    out = stepper.step({2: more, 3: prompt[4:6], 0: other[:1]}, padded_to=NUM_TOKENS)
    whole = prompt + [nodes[i] for i in path_of(7)] + more
    alone.step({1: whole[:-2]}, padded_to=NUM_TOKENS)
    np.testing.assert_allclose(out[2], alone.step({1: more}, padded_to=NUM_TOKENS)[1], atol=2e-5)
    expected = alone.step({2: prompt[:6]}, padded_to=NUM_TOKENS)[2]
    np.testing.assert_allclose(out[3], expected[4:], atol=2e-5)
