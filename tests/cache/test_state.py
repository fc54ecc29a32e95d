# SPDX-License-Identifier: Apache-2.0
"""KVState: its pools, and that its verbs move the pages' contents along, in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import copies_and_selects
from kv_states import SIZES, append, big_state, make, read

from jax_paged import KVGroup, KVState, Status
from jax_paged.layout import LAYOUTS, POOLS, pool_of_v, slots_first
from jax_paged.ops.write import write_kv

DTYPES = "dtype: expected bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2 or int8"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [{"page_size": 2}, {"num_pages": 11}], ids=str)
def test_a_table_of_other_pages_than_the_pool_is_refused(change, layout):
    kv, other = make(layout=layout), make(layout=layout, **change).table
    wanted = "table: expected num_pages=12 and page_size=4 as in k_pages [2, 12, "
    got = f" of layout '{layout}', got num_pages={other.num_pages} and page_size={other.page_size}"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}.*{re.escape(got)}$"):
        kv.replace(table=other)
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
        KVGroup(kv.k_pages, kv.v_pages, other, kv.layout)
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
        jax.eval_shape(lambda kv, table: kv.replace(table=table), kv, other)


def test_the_latent_rows_of_mla_have_the_pages_of_their_table_too():
    sizes = {name: SIZES[name] for name in ("num_pages", "max_seqs", "pages_per_seq", "dtype")}
    latent = KVState.create(layer_kinds=["mla"] * 2, latent_dim=8, page_size=4, **sizes)
    expected = r"^table: expected num_pages=12 and page_size=4 as in k_pages \[2, 12, 4, 8\] of "
    with pytest.raises(ValueError, match=expected):
        latent.replace(table=make(page_size=2).table)


@pytest.mark.parametrize("leaf", [None, "name", jax.ShapeDtypeStruct((), "int32")], ids=str)
def test_a_state_is_a_pytree_of_any_leaves(leaf):
    kv = make()
    leaves, structure = jax.tree.flatten(kv)
    assert jax.tree.unflatten(structure, [leaf] * len(leaves)).k_pages == leaf
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), kv)
    assert jax.vmap(lambda kv: kv.table.num_free)(stacked).tolist() == [12, 12]


def test_create_makes_zeroed_pools_of_the_layout():
    for layout, k_shape, v_shape in (
        ("HND", (2, 12, 2, 4, 8), (2, 12, 2, 4, 16)),
        ("NHD", (2, 12, 4, 2, 8), (2, 12, 4, 2, 16)),
        ("vllm5d", (2, 12, 2, 1, 4, 8), (2, 12, 2, 16, 4)),
    ):
        kv = make(layout=layout, v_head_dim=16, dtype=jnp.bfloat16)
        assert kv.k_pages.shape == k_shape
        assert kv.v_pages.shape == v_shape
        assert kv.k_pages.dtype == kv.v_pages.dtype == jnp.bfloat16
        assert not jnp.any(kv.k_pages)
        assert not jnp.any(kv.v_pages)
        assert kv.table.is_empty
    kv = make(layout="rpa")
    assert kv.k_pages.shape == (2, 12, 4, 4, 8)
    assert kv.v_pages is None
    assert not kv.groups[0].is_latent


def test_no_two_leaves_share_a_buffer():
    for kv in (make(), jax.jit(make)(), make().reset()):
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kv)]
        assert len(set(pointers)) == len(pointers) == 14


def test_a_state_round_trips_as_a_pytree():
    kv = make(layout="NHD")
    again = jax.tree.map(lambda leaf: leaf, kv)
    assert (again.layout, again.table.page_size) == ("NHD", 4)
    assert jax.tree.structure(again) == jax.tree.structure(kv)
    assert jax.tree.structure(again) != jax.tree.structure(make())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected an integer of at least 1, got 0"),
        ({"num_kv_heads": 2.0}, "num_kv_heads: expected an integer of at least 1, got 2.0"),
        ({"head_dim": -8}, "head_dim: expected an integer of at least 1, got -8"),
        ({"v_head_dim": 0}, "v_head_dim: expected an integer of at least 1, got 0"),
        ({"num_pages": 0}, "num_pages: expected an integer of at least 1, got 0"),
        ({"dtype": "int16"}, f"{DTYPES}, got int16"),
        ({"dtype": "nonsense"}, f"{DTYPES}, got nonsense"),
        ({"dtype": None}, f"{DTYPES}, got None"),
        (
            {"layout": "vllm5d", "head_dim": 24, "dtype": "int8"},
            "head_dim: expected a multiple of x=16 (int8 elements in 16 bytes) for layout "
            "'vllm5d', got 24",
        ),
        ({"dtype": "int8", "k_scale": 1.0}, "v_scale: expected given as k_scale is, got None"),
        (
            {"k_scale": 1.0, "v_scale": 1.0},
            "k_scale: expected None for pages of float32, got a scale",
        ),
        (
            {"layout": "vllm5d", "head_dim": 12, "dtype": jnp.bfloat16},
            "head_dim: expected a multiple of x=8 (bfloat16 elements in 16 bytes) for layout "
            "'vllm5d', got 12",
        ),
        (
            {"layout": "rpa", "v_head_dim": 16},
            "v_head_dim: expected head_dim=8 for layout 'rpa', got 16",
        ),
        ({"layout": "DNH"}, "layout: expected 'HND' or 'NHD' or 'vllm5d' or 'rpa', got 'DNH'"),
    ],
)
def test_create_names_a_wrong_argument(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**change)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forked_rows_go_separate_ways(layout):
    kv = append(make(layout=layout), [0], [6], range(6))
    kv, status = kv.fork([0, 0, -1], [1, 3, 2], [6, 5, 0])
    assert status.tolist() == [Status.OK] * 3
    kv = append(kv, [0, 1, 3], [3, 3, 3], range(10, 19))
    assert read(kv, 0) == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    assert read(kv, 1) == [0, 1, 2, 3, 4, 5, 13, 14, 15]
    assert read(kv, 3) == [0, 1, 2, 3, 4, 16, 17, 18]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_cut_inside_a_shared_page_does_not_overwrite_the_others(layout):
    kv = append(make(layout=layout), [0], [8], range(8))
    kv, _ = kv.fork([0, 0], [1, 2], 8)
    kv, status = kv.truncate([1, 2], [1, 6])
    assert status.tolist() == [Status.OK] * 2
    kv = append(kv, [2, 0, 1], [2, 1, 2], [20, 21, 30, 40, 41])
    assert read(kv, 0) == [0, 1, 2, 3, 4, 5, 6, 7, 30]
    assert read(kv, 1) == [0, 1, 2, 3, 4, 5, 6, 40, 41]
    assert read(kv, 2) == [0, 1, 20, 21]


def test_all_holders_cut_inside_one_page_go_separate_ways():
    kv = append(make(), [0], [4], range(4))
    kv, _ = kv.fork([0, 0], [1, 2], 4)
    kv, _ = kv.truncate([2, 1, 0], [1, 2, 3])
    kv = append(kv, [0, 1, 2], [1, 1, 1], [10, 11, 12])
    assert read(kv, 0) == [0, 10]
    assert read(kv, 1) == [0, 1, 11]
    assert read(kv, 2) == [0, 1, 2, 12]


def test_a_failed_call_leaves_the_pages_as_they_are():
    kv = append(make(num_pages=3), [0], [12], range(12))
    before = np.asarray(kv.k_pages)
    kv, status = kv.fork([0, 0], [1, 2], [8, 7])
    assert status.tolist() == [Status.OK, Status.POOL_FULL]
    np.testing.assert_array_equal(kv.k_pages, before)
    kv, _ = kv.fork([0], [1], 8)
    kv, status = kv.truncate([1], 1)
    assert status.tolist() == [Status.POOL_FULL]
    np.testing.assert_array_equal(kv.k_pages, before)
    assert read(kv, 1) == list(range(8))


def test_release_and_reset_free_the_rows():
    kv = append(make(), [0, 1], [5, 5], range(10))
    kv, status = kv.release([1])
    assert status.tolist() == [Status.OK]
    assert kv.table.free_rows.tolist() == [False, True, True, True]
    assert kv.reset().table.is_empty


def test_a_generation_runs_in_one_while_loop():
    def step(carry):
        kv, steps, _ = carry
        rows = jnp.arange(2, dtype=jnp.int32)
        kv, status = kv.reserve(rows, 1)
        kv, batch, _ = kv.step(rows, 1)
        k = jnp.broadcast_to(batch.positions.astype(jnp.float32)[:, None, None], (2, 2, 8))
        k_pages, v_pages = write_kv(
            kv.k_pages, kv.v_pages, k, -k, batch.slot_mapping, layer=0, implementation="reference"
        )
        kv = kv.replace(k_pages=k_pages, v_pages=v_pages)
        return kv, steps + 1, jnp.all(status == 0)

    def run(kv):
        first = kv, jnp.int32(0), jnp.bool_(True)
        return jax.lax.while_loop(lambda carry: carry[2], step, first)

    kv, steps, _ = jax.jit(run, donate_argnums=0)(make(num_layers=1))
    assert int(steps) == 13  # the last one finds the rows full
    assert read(kv, 0) == read(kv, 1) == list(range(12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_fork_and_truncate_copy_pages_in_place(dtype):
    kv, rows = big_state(dtype), jnp.zeros(2, jnp.int32)
    pool_bytes = kv.k_pages.size * kv.k_pages.dtype.itemsize
    for verb, args in ((KVState.fork, (rows, rows, rows)), (KVState.truncate, (rows, rows))):
        compiled = jax.jit(verb, donate_argnums=0).lower(kv, *args).compile()
        assert copies_and_selects(compiled, kv.k_pages) == []
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < pool_bytes // 8
        assert memory.alias_size_in_bytes >= 2 * pool_bytes


def test_a_select_between_pools_would_be_noticed():
    def careless(kv, rows):
        forked, status = kv.fork(rows, rows, rows)
        ok = jnp.all(status == 0)
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), forked, kv)

    kv = big_state()
    compiled = jax.jit(careless, donate_argnums=0).lower(kv, jnp.zeros(2, jnp.int32)).compile()
    assert copies_and_selects(compiled, kv.k_pages)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_scales_per_token_go_with_their_pages(dtype, layout):
    kv = make(dtype=dtype, layout=layout, head_dim=16)
    assert kv.k_scale.shape == kv.v_scale.shape == (2, 12, 2, 4)

    def append_8_bit(kv, rows, q_lens, values):
        """Token t has K = values[t] and V = -2 values[t]: all of it in the scales."""
        kv, status = kv.reserve(rows, q_lens)
        assert not any(status.tolist())
        kv, batch, status = kv.step(rows, q_lens, num_tokens=len(values))
        assert not any(status.tolist())
        k = jnp.asarray(np.broadcast_to(np.float32(values)[:, None, None], (len(values), 2, 16)))
        pools = (kv.k_pages, kv.v_pages, kv.k_scale, kv.v_scale)
        for layer in range(2):
            pools = write_kv(
                *pools[:2], k, -2 * k, batch.slot_mapping, layer=layer, layout=layout,
                k_scale=pools[2], v_scale=pools[3],
            )  # fmt: skip
        names = ("k_pages", "v_pages", "k_scale", "v_scale")
        return kv.replace(**dict(zip(names, pools, strict=True)))

    def read_8_bit(kv, row):
        ids = np.asarray(kv.table.page_table[row])[: int(kv.table.pages_held[row])]
        tokens, found = int(kv.table.seq_lens[row]), []
        for pool in POOLS:
            both = {"k": kv.k_pages, "v": pool_of_v(kv.k_pages, kv.v_pages, layout)}
            pages_, scale = both[pool], getattr(kv, f"{pool}_scale")
            codes = slots_first(np.asarray(pages_.astype(jnp.float32))[:, ids], layout, pool)
            factor = slots_first(np.asarray(scale)[:, ids][..., None], "HND")
            real = (codes * factor).reshape(2, -1, 2, 16)[:, :tokens]
            np.testing.assert_allclose(real, np.broadcast_to(real[:1, :, :1, :1], real.shape))
            found.append(real[0, :, 0, 0])
        np.testing.assert_allclose(found[1], -2 * found[0], rtol=1e-6)
        return np.round(found[0], 3).tolist()

    kv = append_8_bit(kv, [0], [6], range(1, 7))
    kv, status = kv.fork([0], [1], [5])  # shares a page and copies one token of the next
    assert status.tolist() == [Status.OK]
    kv = append_8_bit(kv, [0, 1], [2, 2], [10, 11, 20, 21])
    assert read_8_bit(kv, 0) == [1, 2, 3, 4, 5, 6, 10, 11]
    assert read_8_bit(kv, 1) == [1, 2, 3, 4, 5, 20, 21]
    kv, status = kv.fork([0], [2], [8])
    kv, status = kv.truncate([2], [1])  # its last page is row 0's, too: copied
    kv = append_8_bit(kv, [2], [1], [30])
    assert read_8_bit(kv, 0) == [1, 2, 3, 4, 5, 6, 10, 11]
    assert read_8_bit(kv, 2) == [1, 2, 3, 4, 5, 6, 10, 30]
    kv, _ = kv.release([0])
    kv = append_8_bit(kv, [3], [7], range(40, 47))  # on pages that row 0 has left
    assert read_8_bit(kv, 1) == [1, 2, 3, 4, 5, 20, 21]
    assert read_8_bit(kv, 3) == list(range(40, 47))


def test_given_scales_stay_as_they_are():
    scale = jnp.asarray([[0.5, 0.25], [1, 2]], jnp.float32)
    kv = make(dtype="float8_e5m2", k_scale=scale, v_scale=0.5)
    kv, _ = kv.reserve([0], [6])
    kv, _, _ = kv.step([0], [6], num_tokens=6)
    kv, status = kv.fork([0], [1], [5])
    assert status.tolist() == [Status.OK]
    np.testing.assert_array_equal(kv.k_scale, scale)
    assert kv.v_scale.shape == ()


def test_scales_are_copied_in_place():
    kv = jax.eval_shape(lambda: make(dtype="int8", num_pages=64))
    rows = jnp.zeros(1, jnp.int32)
    compiled = jax.jit(KVState.fork, donate_argnums=0).lower(kv, rows, rows + 1, rows + 3).compile()
    assert copies_and_selects(compiled, kv.k_scale) == []
