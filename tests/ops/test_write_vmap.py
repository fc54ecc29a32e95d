# SPDX-License-Identifier: Apache-2.0
"""vmap of the ops that write pages: one call for all elements, with the bits of a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import copy_pages, move_slots, qkv_norm_rope_write, scatter_kv, write_kv
from jax_paged.layout import LAYOUTS
from jax_paged.ops.mla import write_mla_kv
from jax_paged.testing import is_in_place, pool_sized_ops
from jax_paged.testing.writes import bits, head_dims, make_pools

I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
# Of pools with 7 pages of 5: two tokens for one slot, first and last slot, and those just outside.
SLOTS = [
    [3, 34, 3, -1, 0, 35, 3],
    [35, 36, 69, 70, -1, -35, 34],
    [I32_MAX, I32_MIN, 0, 0, 0, 12, 12],
]
pytestmark = pytest.mark.cuda


def pools_of_each(**options):
    """[3, …] pools of K and V (None for V of "rpa"), all different."""
    pools = [
        None if x is None else np.stack([np.roll(x, i) for i in range(3)])
        for x in make_pools(**options)
    ]
    return [None if x is None else jnp.asarray(x) for x in pools]


def codes_of_each(pools):
    """The same pools, of int8."""
    return [None if x is None else jnp.nan_to_num(20 * x).astype(jnp.int8) for x in pools]


def new_tokens(layout, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((3, 7, 2, d)), dtype) for d in head_dims(layout)]


def assert_the_loop(function, in_axes, *operands):
    """vmap(function) has the bits of one call per element, also under jit."""

    def element(i, x, axis):
        return x + 0 if axis is None else x[i]

    expected = [
        function(
            *(x if x is None else element(i, x, a) for x, a in zip(operands, in_axes, strict=True))
        )
        for i in range(3)
    ]
    mapped = jax.vmap(function, in_axes)
    for run in (mapped, jax.jit(mapped)):
        got = run(*jax.tree.map(lambda x: x + 0, operands))
        for i, one in enumerate(expected):
            assert jax.tree.structure(got) == jax.tree.structure(one)
            jax.tree.map(
                lambda a, b, i=i: np.testing.assert_array_equal(bits(a[i]), bits(b)), got, one
            )


@pytest.mark.parametrize("layer", [None, "traced", "wild", 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_to_pools_of_a_batch_have_the_bits_of_a_loop(layout, layer, implementation):
    pools = pools_of_each(layout=layout, num_layers=None if layer is None else 3, dtype="bfloat16")
    layers = {"traced": jnp.array([2, 0, 1]), "wild": jnp.array([-1, 3, I32_MAX])}.get(layer)

    def write(k_pages, v_pages, k, v, slots, index):
        index = layer if index is None else index
        options = {"layer": index, "layout": layout, "implementation": implementation}
        return write_kv(k_pages, v_pages, k, v, slots, **options)

    new, slots = new_tokens(layout), jnp.array(SLOTS)
    assert_the_loop(write, (0,) * 6, *pools, *new, slots, layers)
    shared = [x[0] for x in new]  # tokens and layer of all elements, slots of each
    one = None if layers is None else layers[0]
    assert_the_loop(write, (0, 0, None, None, 0, None), *pools, *shared, slots, one)


@pytest.mark.parametrize("kind", ["head", "token"])
def test_writes_to_8_bit_pools_of_a_batch_have_the_bits_of_a_loop(kind, implementation):
    pools = codes_of_each(pools_of_each(num_layers=2))
    shape = (3, 2, 7, 2, 5) if kind == "token" else (3, 2, 2)
    scales = [jnp.full(shape, x, jnp.float32) for x in (0.5, 0.25)]

    def write(k_pages, v_pages, k, v, slots, k_scale, v_scale):
        options = {"layer": 1, "implementation": implementation}
        return write_kv(k_pages, v_pages, k, v, slots, k_scale=k_scale, v_scale=v_scale, **options)

    assert_the_loop(write, (0,) * 7, *pools, *new_tokens("HND"), jnp.array(SLOTS), *scales)


def test_nested_vmap_equals_the_loop(implementation):
    pools, new = pools_of_each(), new_tokens("HND")
    slots = jnp.array(SLOTS)
    write = functools.partial(write_kv, implementation=implementation)

    def twice(*operands):
        both = (jnp.stack([x, x]) for x in operands)
        return jax.vmap(write)(*both)

    assert_the_loop(twice, (0,) * 5, *pools, *new, slots)


@pytest.mark.parametrize("tables", [None, 0])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int8, scales of heads", "int8, of tokens"])
@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_of_a_batch_have_the_bits_of_a_loop(
    layout, num_layers, dtype, tables, implementation
):
    is_int8 = dtype.startswith("int8")
    if is_int8:
        layout = "HND" if layout == "vllm5d" else layout  # whose K has another shape in 8 bits
    pools = pools_of_each(layout=layout, num_layers=num_layers)
    pools = codes_of_each(pools) if is_int8 else pools
    layers = () if num_layers is None else (num_layers,)
    shape = {"int8, scales of heads": (3, *layers, 2), "int8, of tokens": (3, *layers, 7, 2, 5)}
    scales = [None, None]
    if dtype in shape:
        drawn = np.random.default_rng(2).uniform(0.01, 0.1, (2, *shape[dtype]))
        scales = [jnp.asarray(x, jnp.float32) for x in drawn]
    rng = np.random.default_rng(1)
    width = 5 * 16 + 2 * head_dims(layout)[1]
    qkv = jnp.asarray(rng.standard_normal((3, 7, width), "f4"))
    cos, sin = (jnp.asarray(rng.uniform(-1, 1, (3, 9, 8)), jnp.float32) for _ in "cs")
    if tables is None:
        cos, sin = cos[0], sin[0]
    norm = jnp.ones((3, 16), jnp.float32) if tables == 0 else jnp.full(16, 2, jnp.float32)
    positions = jnp.array(
        [[0, 8, 1, 2, 3, 4, 9], [9, -1, 0, 8, 7, 6, 5], [I32_MAX, I32_MIN, *range(5)]]
    )
    layer = None if num_layers is None else jnp.array([1, 2, 0])

    def call(qkv, k_pages, v_pages, positions, slots, cos, sin, norm, layer, k_scale, v_scale):
        return qkv_norm_rope_write(
            qkv, k_pages, v_pages, positions, slots, cos, sin, q_norm=norm, k_norm=norm,
            num_q_heads=3, layer=layer, layout=layout, k_scale=k_scale, v_scale=v_scale,
            implementation=implementation,
        )  # fmt: skip

    axes = (0, 0, 0, 0, 0, tables, tables, tables, 0, 0, 0)
    operands = (qkv, *pools, positions, jnp.array(SLOTS), cos, sin, norm, layer, *scales)
    assert_the_loop(call, axes, *operands)


def test_more_rows_than_i32_counts_are_refused():
    pool = jax.ShapeDtypeStruct((2**12, 2**16, 8, 8), jnp.int8)
    rows, slots = jax.ShapeDtypeStruct((3, 8), jnp.float32), jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"vmap: .* fewer than 2\^31 .* 4096 of 524288"):
        jax.eval_shape(jax.vmap(write_mla_kv, (0, None, None)), pool, rows, slots)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_latent_rows_moves_and_copies_of_a_batch_have_the_bits_of_a_loop(num_layers):
    layer = None if num_layers is None else 1
    k_pages, v_pages = pools_of_each(num_layers=num_layers, dtype="bfloat16")
    latent = k_pages.reshape(*k_pages.shape[:-3], 2 * 5, 16)
    slots, rows = jnp.array(SLOTS), new_tokens("HND")[0][:, :, 0]
    write = functools.partial(write_mla_kv, layer=layer)
    assert_the_loop(write, (0, 0, 0), latent, rows, slots)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):  # each has a copy
        shared = jax.vmap(write, (None, 0, 0))(latent[0], rows, slots)
    each = [write(latent[0] + 0, *x) for x in zip(rows, slots, strict=True)]
    np.testing.assert_array_equal(bits(shared), bits(jnp.stack(each)))
    assert_the_loop(move_slots, (0,) * 4, k_pages, v_pages, slots[::-1], slots)
    pages = jnp.array([[6, 7, 0], [-1, 1, 2], [3, 3, 5]])
    assert_the_loop(copy_pages, (0,) * 4, k_pages, v_pages, pages, pages.at[2].set([0, 1, 7]) - 1)
    tables = jnp.array([[6, 2], [-1, 1], [3, 7]])
    one = [jnp.array([x]) for x in (0, 2, 9)]
    k, v = (x[:, None] for x in new_tokens("HND"))
    scatter = functools.partial(scatter_kv, layer=layer)

    def scatter_one(k_pages, v_pages, k, v, table):
        return scatter(k_pages, v_pages, k, v, table[None], *one)

    assert_the_loop(scatter_one, (0,) * 5, k_pages, v_pages, k, v, tables)


@pytest.mark.parametrize("num_layers", [None, 3])
def test_a_batch_of_donated_pools_is_written_in_place(num_layers):
    layers = () if num_layers is None else (num_layers,)
    pool = jax.ShapeDtypeStruct((4, *layers, 64, 2, 16, 32), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 3, 2, 32), jnp.float32)
    slots = jax.ShapeDtypeStruct((4, 3), jnp.int32)
    step = jax.jit(
        jax.vmap(functools.partial(write_kv, implementation="native")), donate_argnums=(0, 1)
    )
    if num_layers is None:  # XLA copies what is reshaped
        compiled = step.lower(pool, pool, new, new, slots).compile()
        assert pool_sized_ops(compiled, pool) == []
        assert is_in_place(compiled, pool)
    latent = jax.ShapeDtypeStruct((4, *layers, 64, 16, 32), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((4, 3, 32), jnp.float32)
    write = functools.partial(write_mla_kv, layer=1 if layers else None)
    compiled = jax.jit(jax.vmap(write), donate_argnums=0).lower(latent, rows, slots).compile()
    assert pool_sized_ops(compiled, latent) == []
    assert is_in_place(compiled, latent)
