# SPDX-License-Identifier: Apache-2.0
"""Several devices, threads and calls at once: the answers stay those of one call at a time.

Each program below runs in a process of its own (this file as a script), because a deadlock must not
stop the suite and the number of devices is fixed when JAX starts.
"""

import functools
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import on_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import first_of

from jax_paged import ragged_paged_attention, write_kv
from jax_paged.testing import Case, is_in_place, make_batch

CASE = Case("eight_kv_heads", 16, 8, 32, page_size=8, num_layers=2)
TIMEOUT_S = 120


def step(k_pages, v_pages, q, k, v, slots, table, seq_lens, cu_q_lens, layer):
    """Writes three rows' tokens into a layer of the pool and attends."""
    pages = write_kv(k_pages, v_pages, k, v, slots, layer=layer)
    return pages, ragged_paged_attention(q, *pages, table, seq_lens, cu_q_lens, layer=layer)


def operands(seed):
    """Operands of `step`; the new tokens go to the first page of row 1."""
    batch = make_batch(CASE, jnp.float32, [1, 9, 1], [200, 9, 77], seed=seed)
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    k, v = np.random.default_rng(seed).standard_normal((2, 11, 8, 32), "f4")
    slots = np.full(11, -1, np.int32)
    slots[2:10] = batch.page_table[1, 0] * 8 + np.arange(8)
    rest = (jnp.asarray(slots), table, seq_lens, jnp.asarray(batch.cu_q_lens))
    return k_pages, v_pages, q, jnp.asarray(k), jnp.asarray(v), *rest, jnp.int32(batch.layer)


def assert_same(results, expected):
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def run_threads(work, count):
    """Runs work(0) … work(count − 1), each in its thread; raises what the first failure raised."""
    failures = []

    def guarded(index):
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def two_calls_in_flight_do_not_mix():
    jitted = jax.jit(step)
    inputs = [operands(seed) for seed in range(2)]
    expected = [jax.block_until_ready(jitted(*x)) for x in inputs]
    for _ in range(50):
        assert_same([jitted(*x) for x in inputs], expected)


def threads_do_not_mix_results():
    jitted = jax.jit(step)
    inputs = [operands(seed) for seed in range(6)]
    expected = [jax.block_until_ready(jitted(*x)) for x in inputs]

    def work(index):
        for _ in range(50):
            assert_same(jitted(*inputs[index]), expected[index])

    run_threads(work, 6)


def threads_may_compile_at_once():
    inputs = operands(0)
    expected = jax.jit(step)(*inputs)
    run_threads(lambda _: assert_same(jax.jit(lambda *x: step(*x))(*inputs), expected), 6)


def eight_devices_run_at_once():
    jitted = jax.jit(step)
    inputs = [jax.device_put(operands(i), device) for i, device in enumerate(jax.devices())]
    expected = [jax.block_until_ready(jitted(*x)) for x in inputs]
    for _ in range(20):
        results = [jitted(*x) for x in inputs]
        assert [out.devices() for _, out in results] == [{d} for d in jax.devices()]
        assert_same(results, expected)


POOL, TOKENS = P(None, None, "tp"), P(None, "tp")
SPECS = (POOL, POOL, TOKENS, TOKENS, TOKENS, *[P()] * 5)


def shard(mesh, inputs):
    """`step` over the KV heads of a mesh, and the inputs placed for it."""
    sharded = jax.shard_map(step, mesh=mesh, in_specs=SPECS, out_specs=((POOL, POOL), TOKENS))
    specs = SPECS[: len(inputs)]
    return sharded, [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs, strict=True)
    ]


def shard_map_gives_the_bits_of_one_device_without_collectives():
    inputs = operands(0)
    expected = jax.jit(step)(*inputs)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("tp",), axis_types=(axis_type,))
        sharded, placed = shard(mesh, inputs)
        compiled = jax.jit(sharded, donate_argnums=(0, 1)).lower(*placed).compile()
        for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert word not in compiled.as_text()
        local = placed[0].addressable_shards[0].data
        assert is_in_place(compiled, jax.ShapeDtypeStruct(local.shape, local.dtype))
        assert_same(compiled(*placed), expected)


def shard_map_in_a_scan_keeps_the_pool_in_place():
    k_pages, v_pages, *rest, _ = operands(0)
    inputs = (jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages), *rest)

    def scan(attend, k_pages, v_pages, q, *rest):
        def body(carry, layer):
            pages, q = carry
            pages, out = attend(*pages, q, *rest, layer)
            return (pages, q + out), None

        layers = jnp.arange(2, dtype=jnp.int32)
        return jax.lax.scan(body, ((k_pages, v_pages), q), layers)[0]

    def addresses(pages):
        return {s.data.unsafe_buffer_pointer() for x in pages for s in x.addressable_shards}

    _, expected = jax.jit(functools.partial(scan, step))(*inputs)
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    sharded, placed = shard(mesh, inputs)
    before = addresses(placed[:2])
    pages, out = jax.jit(functools.partial(scan, sharded), donate_argnums=(0, 1))(*placed)
    assert addresses(pages) == before
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def gradients_pass_through_shard_map():
    k_pages, v_pages, q, _, _, _, *indices = operands(0)

    def attend(q, k_pages, v_pages, sm_scale, *indices):
        *indices, layer = indices
        return ragged_paged_attention(q, k_pages, v_pages, *indices, layer=layer, sm_scale=sm_scale)

    def loss(attend, *operands):
        return jnp.sum(jnp.sin(attend(*operands)))

    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    specs = (TOKENS, POOL, POOL, *[P()] * 5)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=TOKENS)
    inputs = (q, k_pages, v_pages, jnp.float32(0.2), *indices)
    results = [
        jax.jit(jax.grad(functools.partial(loss, f), argnums=(0, 1, 2, 3)))(*inputs)
        for f in (sharded, attend)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


PROGRAMS = {
    two_calls_in_flight_do_not_mix: 1,
    threads_do_not_mix_results: 1,
    threads_may_compile_at_once: 1,
    shard_map_gives_the_bits_of_one_device_without_collectives: 8,
    shard_map_in_a_scan_keeps_the_pool_in_place: 8,
    eight_devices_run_at_once: 8,
    gradients_pass_through_shard_map: 8,
}


@pytest.mark.parametrize(
    "program", first_of(PROGRAMS, len(PROGRAMS) - 2), ids=lambda program: program.__name__
)
def test_in_a_process_of_its_own(program):
    child = subprocess.run(
        [sys.executable, "-W", "error", __file__, program.__name__],
        # Nothing is loaded that was compiled before: threads are to compile.
        env=on_devices(PROGRAMS[program]) | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    chosen = {program.__name__: program for program in PROGRAMS}[sys.argv[1]]
    assert jax.device_count() == PROGRAMS[chosen]
    chosen()
