# SPDX-License-Identifier: Apache-2.0
"""No program copies the pool: on the optimised HLO, and by the address of the buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import copy_pages, paged_attention, ragged_paged_attention, write_kv
from jax_paged.testing import is_in_place, pool_sized_ops

LAYERS = 3
POOL = jax.ShapeDtypeStruct((LAYERS, 64, 2, 16, 32), jnp.float32)
POOLS = {  # K and V pools with the sizes of POOL
    "HND": (POOL, POOL),
    "vllm5d": tuple(
        jax.ShapeDtypeStruct(shape, POOL.dtype)
        for shape in ((LAYERS, 64, 2, 8, 16, 4), (LAYERS, 64, 2, 32, 16))
    ),
    "rpa": (jax.ShapeDtypeStruct((LAYERS, 64, 16, 4, 32), POOL.dtype), None),
}
FLAT_POOL = jax.ShapeDtypeStruct(POOL.shape[1:], POOL.dtype)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# q, k, v, slots, page_table, seq_lens of one decode step over four rows.
DECODE = (f32(4, 8, 32), f32(4, 2, 32), f32(4, 2, 32), i32(4), i32(4, 8), i32(4))
# The same of a mixed step with 19 new tokens, and cu_q_lens.
MIXED = (f32(19, 8, 32), f32(19, 2, 32), f32(19, 2, 32), i32(19), i32(4, 8), i32(4), i32(5))


def compile_donating(function, *operands):
    """Compiles with the first two operands donated."""
    return jax.jit(function, donate_argnums=(0, 1)).lower(*operands).compile()


def attend_layer(pages, q, k, v, slots, *rest, layer, layout):
    """One layer of a step: write, then attend on the returned pages. Returns (pages, q).

    As in a model, what is written depends on what the layer before has read.
    """
    k = k + q[:, : k.shape[1]]
    options = {"layer": layer, "layout": layout, "implementation": "native"}
    pages = write_kv(*pages, k, v, slots, **options)
    attend = paged_attention if len(rest) == 2 else ragged_paged_attention
    return pages, q + attend(q, *pages, *rest, **options)


def loop_step(k_pages, v_pages, q, *rest, layout="HND"):
    pages = k_pages, v_pages
    for layer in range(LAYERS):
        pages, q = attend_layer(pages, q, *rest, layer=layer, layout=layout)
    return pages, q


def scan_step(k_pages, v_pages, q, *rest, layout="HND"):
    def body(carry, layer):
        return attend_layer(*carry, *rest, layer=layer, layout=layout), None

    carry, _ = jax.lax.scan(body, ((k_pages, v_pages), q), jnp.arange(LAYERS, dtype=jnp.int32))
    return carry


def while_step(k_pages, v_pages, q, *rest, layout="HND"):
    """A generate loop: five decode steps, each over all layers, as one program."""

    def step(state):
        count, pages, q = state
        return (count + 1, *scan_step(*pages, q, *rest, layout=layout))

    state = (jnp.int32(0), (k_pages, v_pages), q)
    return jax.lax.while_loop(lambda state: state[0] < 5, step, state)[1:]


STEPS = {"loop": loop_step, "scan": scan_step, "while": while_step}


@pytest.mark.parametrize("pool", [POOL, FLAT_POOL], ids=["stacked", "flat"])
def test_one_write_makes_no_pool_sized_array(pool):
    layer = 1 if pool is POOL else None
    write = functools.partial(write_kv, layer=layer, implementation="native")
    compiled = compile_donating(write, pool, pool, *DECODE[1:4])
    assert pool_sized_ops(compiled, pool) == []


@pytest.mark.parametrize("operands", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layout", POOLS)
def test_a_step_makes_no_pool_sized_array(layout, step, operands):
    run = functools.partial(STEPS[step], layout=layout)
    compiled = compile_donating(run, *POOLS[layout], *operands)
    assert pool_sized_ops(compiled, POOL) == []
    assert is_in_place(compiled, POOL)


def test_a_pool_that_is_not_donated_is_copied_once_each():
    compiled = jax.jit(scan_step).lower(POOL, POOL, *DECODE).compile()
    found = pool_sized_ops(compiled, POOL)
    assert len(found) == 2, found
    assert all(" copy(" in line for line in found), found
    assert not is_in_place(compiled, POOL)


@pytest.mark.parametrize(
    "bad",
    [
        lambda k, v: (k + 1, v),
        lambda k, v: (jax.lax.select(k[0, 0, 0, 0, 0] > 0, k, v), v),
        lambda k, v: jax.lax.scan(lambda c, xy: (c, xy), None, (k, v + 1))[1],
    ],
    ids=["add", "select", "scan_xs"],
)
def test_the_search_finds_programs_that_copy(bad):
    assert not is_in_place(compile_donating(bad, POOL, POOL), POOL)


def test_slicing_a_layer_out_of_the_pool_is_found():
    def slice_step(k_pages, v_pages, k, v, slots):
        for layer in range(LAYERS):
            pages = k_pages[layer], v_pages[layer]
            pages = write_kv(*pages, k, v, slots, implementation="native")
            k_pages, v_pages = k_pages.at[layer].set(pages[0]), v_pages.at[layer].set(pages[1])
        return k_pages, v_pages

    compiled = compile_donating(slice_step, POOL, POOL, *DECODE[1:4])
    assert pool_sized_ops(compiled, FLAT_POOL)


def random_like(shapes, seed=0):
    """Arrays for shapes; index operands are zeros, the pages are made on the device."""
    rng = np.random.default_rng(seed)
    return [
        jnp.zeros(s.shape, s.dtype)
        if s.dtype == jnp.int32
        else jnp.asarray(rng.standard_normal(s.shape, "f4"))
        for s in shapes
    ]


@pytest.mark.parametrize("step", STEPS)
def test_pages_stay_at_their_address(step):
    run = jax.jit(STEPS[step], donate_argnums=(0, 1))
    pages = [jax.jit(lambda: jnp.zeros(POOL.shape, POOL.dtype))() for _ in range(2)]
    operands = random_like(DECODE)
    for _ in range(3):
        before = {x.unsafe_buffer_pointer() for x in pages}
        pages, _ = run(*pages, *operands)
        assert {x.unsafe_buffer_pointer() for x in pages} == before


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_eager_writes_stay_at_their_address(implementation):
    pages = [jax.jit(lambda: jnp.zeros(POOL.shape, POOL.dtype))() for _ in range(2)]
    _, k, v, slots, *_ = random_like(DECODE)
    before = {x.unsafe_buffer_pointer() for x in pages}
    pages = write_kv(*pages, k, v, slots, layer=1, implementation=implementation)
    pages = copy_pages(*pages, slots[:1], slots[:1] + 1)
    assert {x.unsafe_buffer_pointer() for x in pages} == before


def test_a_pool_that_is_not_donated_keeps_its_contents():
    pages = [jnp.zeros(POOL.shape, POOL.dtype) for _ in range(2)]
    operands = random_like(DECODE)
    after, _ = jax.jit(scan_step)(*pages, *operands)
    assert not np.asarray(pages[0]).any()
    assert np.asarray(after[0]).any()


@pytest.mark.parametrize("layout", POOLS)
def test_copy_pages_makes_nothing_pool_sized_but_the_update_itself(layout):
    compiled = compile_donating(copy_pages, *POOLS[layout], i32(2), i32(2))
    found = pool_sized_ops(compiled, POOL)
    assert not [line for line in found if " copy(" in line or " select(" in line], found
    memory = compiled.memory_analysis()
    pool_bytes = 4 * np.prod(POOL.shape)
    assert memory is not None
    assert memory.temp_size_in_bytes < pool_bytes
