# SPDX-License-Identifier: Apache-2.0
"""Rows of pools set or copied in place: by value, and that no dtype makes XLA convert the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.ops.scatter_rows import COPY_TARGET, TARGET, copy_rows, scatter_rows
from jax_paged.testing import is_in_place

DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]


def make(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(-8, 9, shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def expected_of(pool, rows, values):
    out = np.array(pool, np.float32).reshape(-1, *values.shape[1:])
    for row, value in zip(rows, np.asarray(values, np.float32), strict=True):
        if 0 <= row < len(out):
            out[row] = value
    return out.reshape(pool.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [1, 2, 3])
def test_each_row_gets_its_value_and_others_are_kept(dtype, leading):
    pool = make((3, 5, 4, 3), dtype)
    count = int(np.prod(pool.shape[:leading]))
    rows = [count - 1, -1, 0, count, 2**31 - 1, -(2**31), 1]
    values = make((len(rows), *pool.shape[leading:]), dtype, seed=1)
    expected = expected_of(pool, rows, values)
    out = jax.jit(scatter_rows)(pool, jnp.array(rows, jnp.int32), values)
    assert out.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


def test_many_rows_are_put_by_several_threads():
    pool, rows = make((4000, 128), "bfloat16"), np.random.default_rng(2).permutation(4000)[:3000]
    values = make((3000, 128), "bfloat16", seed=3)
    out = scatter_rows(pool, jnp.asarray(rows, jnp.int32), values)
    np.testing.assert_array_equal(np.asarray(out, "f4"), expected_of(pool, rows, values))


@pytest.mark.parametrize(("shape", "count"), [((0, 4), 2), ((3, 0), 2), ((3, 4), 0)])
def test_nothing_to_put(shape, count):
    pool = jnp.ones(shape, jnp.bfloat16)
    out = scatter_rows(
        pool, jnp.zeros(count, jnp.int32), jnp.zeros((count, shape[1]), jnp.bfloat16)
    )
    assert out.shape == shape
    assert bool((out == 1).all())


PAIRS = {
    "no row is read and written": ([4, 5, 6], [0, 1, 1]),
    "rows that are out of range": ([4, -1, 5, 9, 6, -(2**31)], [0, 1, -1, 2, 2**31 - 1, 3]),
    "a chain": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "a ring, and a row onto itself": ([0, 1, 2, 7], [1, 2, 0, 7]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", PAIRS)
def test_rows_are_copied_as_they_were(pairs, dtype):
    pool, (target, source) = make((9, 4, 3), dtype), np.array(PAIRS[pairs], np.int32)
    expected = np.array(pool, np.float32)
    for to, of in zip(target, source, strict=True):
        if 0 <= to < 9 and 0 <= of < 9:
            expected[to] = np.asarray(pool[of], np.float32)
    out = jax.jit(copy_rows, static_argnums=1)(pool, 1, target, source)
    assert out.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


def test_many_rows_are_copied_by_several_threads():
    pool, rng = make((4000, 128), "bfloat16"), np.random.default_rng(2)
    target, source = (rng.permutation(4000)[:3000].astype(np.int32) for _ in range(2))
    expected = np.array(pool, np.float32)
    expected[target] = np.asarray(pool, np.float32)[source]
    out = copy_rows(pool, 1, target, source)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


def test_copies_in_donated_pools_take_no_memory():
    pool = jax.ShapeDtypeStruct((3, 1024, 2, 64), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1000,), jnp.int32)
    copy = jax.jit(copy_rows, static_argnums=1, donate_argnums=0)
    compiled = copy.lower(pool, 2, rows, rows).compile()
    assert is_in_place(compiled, pool)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1000
    assert COPY_TARGET in (compiled.as_text() or "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_donated_pools_are_updated_in_place_and_never_converted(dtype):
    pool = jax.ShapeDtypeStruct((4, 4096, 64), jnp.dtype(dtype))
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)

    def move(pool, source, target):
        return scatter_rows(pool, target, pool.reshape(-1, 64)[source])

    compiled = jax.jit(move, donate_argnums=0).lower(pool, rows, rows).compile()
    assert is_in_place(compiled, pool)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 10_000
    assert TARGET in (compiled.as_text() or "")


def test_batches_and_tangents_are_those_of_a_scatter():
    pool, rows = jnp.ones((2, 4, 3), jnp.float32), jnp.array([3, -1], jnp.int32)
    values = jnp.full((2, 3), 2, jnp.float32)
    together = jax.vmap(scatter_rows, (0, None, None))(pool, rows, values)
    each = jnp.stack([scatter_rows(one, rows, values) for one in pool])
    np.testing.assert_array_equal(together, each)

    def total(pool, values):
        return jnp.sum(scatter_rows(pool, rows, values) ** 2)

    of_pool, of_values = jax.grad(total, (0, 1))(pool[0], values)
    np.testing.assert_array_equal(of_pool[:, 0], [2, 2, 2, 0])
    np.testing.assert_array_equal(of_values[:, 0], [4, 0])


def test_batches_and_tangents_of_copies_are_those_of_a_gather_and_a_scatter():
    pool = jnp.arange(24.0).reshape(2, 4, 3)
    target, source = jnp.array([3, -1, 0], jnp.int32), jnp.array([1, 0, 3], jnp.int32)
    together = jax.vmap(copy_rows, (0, None, None, None))(pool, 1, target, source)
    each = jnp.stack([copy_rows(one, 1, target, source) for one in pool])
    np.testing.assert_array_equal(together, each)

    def total(pool):
        return jnp.sum(copy_rows(pool, 1, target, source)[:, 0])

    np.testing.assert_array_equal(jax.grad(total)(pool[0])[:, 0], [0, 2, 1, 1])


def test_a_call_that_came_another_way_is_refused():
    def call(pool, rows, values):
        result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
        return jax.ffi.ffi_call(TARGET, result, input_output_aliases={0: 0})(pool, rows, values)

    pool, rows = jnp.ones((4, 3), jnp.float32), jnp.zeros(2, jnp.int32)
    for values, message in (
        (jnp.ones((2, 4), jnp.float32), r"values expected shape \[2, 3\], got \[2, 4\]"),
        (jnp.ones((2, 3), jnp.bfloat16), "values expected float32, got bfloat16"),
        (jnp.ones((1, 2, 4, 3), jnp.float32), "values expected rank 1 to 2"),
    ):
        with pytest.raises(Exception, match=message):
            call(pool, rows, values)

    def call_copy(pool, target, source, leading):
        result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
        call = jax.ffi.ffi_call(COPY_TARGET, result, input_output_aliases={0: 0})
        return call(pool, target, source, leading=np.int64(leading))

    for count, leading, message in (
        (3, 1, r"source expected shape \[2\], got \[3\]"),
        (2, 3, "leading expected 1 to 2, got 3"),
    ):
        with pytest.raises(Exception, match=message):
            call_copy(pool, rows, jnp.zeros(count, jnp.int32), leading)
