# SPDX-License-Identifier: Apache-2.0
"""JAX transforms of the ops: each gives the right answer or is refused with a clear error."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import assert_gradients
from jax import export

import jax_paged
from jax_paged import paged_attention, ragged_paged_attention, write_kv
from jax_paged.testing import Case, dense_oracle, make_batch

SMALL = Case("small", 4, 2, 16, page_size=4)
STACKED = dataclasses.replace(SMALL, num_layers=2)


def attend_fn(batch, implementation, **options):
    """Attention as a function of (q, k_pages, v_pages, sm_scale)."""
    (_, _, _, *rest), defaults = batch.ragged()
    defaults |= {"implementation": implementation} | options

    def attend(q, k_pages, v_pages, sm_scale):
        return ragged_paged_attention(
            q, k_pages, v_pages, *rest, **defaults | {"sm_scale": sm_scale}
        )

    return attend


def floats(batch):
    """The differentiable operands of a batch."""
    return (*batch.operands()[:3], jnp.float32(batch.sm_scale))


def write_operands(num_layers=None):
    """k_pages, v_pages, k, v, slots for a small write."""
    shape = (5, 2, 4, 16) if num_layers is None else (num_layers, 5, 2, 4, 16)
    new = jnp.arange(3 * 2 * 16, dtype=jnp.float32).reshape(3, 2, 16)
    slots = jnp.array([7, -1, 12], jnp.int32)
    return jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32), new, -new, slots


def test_jit_gives_the_bits_of_the_eager_call(implementation):
    batch = make_batch(STACKED, jnp.float32, [1, 6], [9, 13], num_tokens=9)
    attend = attend_fn(batch, implementation)
    np.testing.assert_array_equal(jax.jit(attend)(*floats(batch)), attend(*floats(batch)))


@pytest.mark.parametrize(
    "in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, None, 2)], ids=str
)
def test_vmap_of_reads_equals_the_loop(in_axes, implementation):
    batches = [make_batch(SMALL, jnp.float32, [1, 6], [9, 13], seed=0) for _ in range(3)]
    q, k_pages, v_pages, scale = floats(batches[0])
    attend = attend_fn(batches[0], implementation)
    factors = jnp.array([1, -2, 0.5], jnp.float32)
    operands, axes = [], []
    for x, axis in zip((q, k_pages, v_pages), in_axes, strict=True):
        axes.append(axis)
        stacked = jnp.stack([x * f for f in factors], axis=axis or 0)
        operands.append(x if axis is None else stacked)
    batched = jax.vmap(attend, in_axes=(*axes, None))(*operands, scale)
    for i in range(3):
        one = [
            x if axis is None else jax.lax.index_in_dim(x, i, axis, keepdims=False)
            for x, axis in zip(operands, axes, strict=True)
        ]
        np.testing.assert_allclose(batched[i], attend(*one, scale), rtol=1e-6, atol=1e-6)


def test_vmap_over_index_operands_and_layer_equals_the_loop(implementation):
    batch = make_batch(STACKED, jnp.float32, [1, 1], [9, 13])
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    tables = jnp.stack([table, table[::-1], jnp.full_like(table, -1)])
    lens = jnp.stack([seq_lens, seq_lens[::-1], seq_lens])
    layers = jnp.array([batch.layer, batch.layer, 7], jnp.int32)
    call = functools.partial(paged_attention, q, k_pages, v_pages, implementation=implementation)
    batched = jax.vmap(lambda t, n, layer: call(t, n, layer=layer))(tables, lens, layers)
    for i in range(3):
        one = call(tables[i], lens[i], layer=layers[i])
        np.testing.assert_allclose(batched[i], one, rtol=1e-6, atol=1e-6)


def test_nested_vmap_equals_two_loops(implementation):
    batch = make_batch(SMALL, jnp.float32, [1, 3], [5, 8])
    q, k_pages, v_pages, scale = floats(batch)
    attend = attend_fn(batch, implementation)
    qs = jnp.stack([q, 2 * q])
    scales = scale * jnp.array([1, 2, 3], jnp.float32)
    over_scale = jax.vmap(attend, in_axes=(None, None, None, 0))
    nested = jax.jit(jax.vmap(over_scale, in_axes=(0, None, None, None)))(
        qs, k_pages, v_pages, scales
    )
    assert nested.shape == (2, 3, *q.shape)
    for i in range(2):
        for j in range(3):
            one = attend(qs[i], k_pages, v_pages, scales[j])
            np.testing.assert_allclose(nested[i, j], one, rtol=1e-6, atol=1e-6)


def test_vmap_of_a_native_write_to_one_pool_is_refused():
    k, v, *rest = write_operands()
    several = jnp.stack([rest[-1], rest[-1]])
    one_k, one_v = (0, None, None, None, 0), (None, 0, None, None, 0)
    for axes, name in (((None,) * 4 + (0,), "k_pages"), (one_v, "k_pages"), (one_k, "v_pages")):
        pools = [x if a is None else jnp.stack([x, x]) for x, a in zip((k, v), axes, strict=False)]
        with pytest.raises(NotImplementedError, match=f"write_kv: vmap: {name}: expected a pool"):
            jax.vmap(write_kv, axes)(*pools, *rest[:2], several)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_match_float64_finite_differences(causal, implementation):
    case = dataclasses.replace(STACKED, causal=causal, v_head_dim=24)
    batch = make_batch(case, jnp.float32, [1, 6, 0], [9, 13, 5], num_tokens=9, seed=1)
    rng = np.random.default_rng(0)
    attend = attend_fn(batch, implementation, return_lse=True)
    operands = floats(batch)
    weight = rng.standard_normal((9, 4, 24), "f4")
    live = np.s_[:7]

    def loss(*operands):
        out, lse = attend(*operands)
        return jnp.sum(out * weight) + jnp.sum(jnp.sin(lse[live]))

    def exact_loss(*operands):
        q, k_pages, v_pages, sm_scale = operands
        changed = dataclasses.replace(
            batch, q=q, k_pages=k_pages, v_pages=v_pages, sm_scale=float(sm_scale)
        )
        out, lse = dense_oracle(changed)
        return np.sum(out * weight) + np.sum(np.sin(lse[live]))

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*operands)
    assert_gradients(gradients, exact_loss, operands, rng, rtol=2e-4)


def test_native_gradients_equal_reference_gradients():
    batch = make_batch(SMALL, jnp.bfloat16, [3, 1], [9, 13], num_tokens=6, seed=2)

    def gradients(implementation):
        attend = attend_fn(batch, implementation)
        loss = lambda *operands: attend(*operands).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*floats(batch))

    for native, reference in zip(gradients("native"), gradients("reference"), strict=True):
        np.testing.assert_array_equal(native, reference)


def test_gradients_pass_through_checkpoint_and_vmap(implementation):
    batch = make_batch(SMALL, jnp.float32, [3, 1], [9, 13], seed=3)
    q, *rest = floats(batch)
    attend = attend_fn(batch, implementation)
    expected = jax.grad(lambda q: attend(q, *rest).sum())(q)
    rematerialised = jax.grad(lambda q: jax.checkpoint(attend)(q, *rest).sum())(q)
    np.testing.assert_allclose(rematerialised, expected, rtol=1e-6, atol=1e-6)
    batched = jax.vmap(jax.grad(lambda q: attend(q, *rest).sum()))(jnp.stack([q, q]))
    np.testing.assert_allclose(batched[1], expected, rtol=1e-6, atol=1e-6)


def test_forward_mode_of_a_read_is_refused(implementation):
    batch = make_batch(SMALL, jnp.float32, [3], [9])
    q, *rest = floats(batch)
    attend = attend_fn(batch, implementation)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: attend(q, *rest), (q,), (q,))


def test_gradient_of_a_native_write_is_refused():
    k_pages, v_pages, k, v, slots = write_operands()
    with pytest.raises(NotImplementedError, match="write_kv: not differentiable"):
        jax.grad(lambda k: write_kv(k_pages, v_pages, k, v, slots)[0].sum())(k)


def test_gradient_of_the_reference_write_reaches_the_written_tokens():
    k_pages, v_pages, k, v, slots = write_operands()
    write = functools.partial(write_kv, implementation="reference")
    gradient = jax.grad(lambda k: write(k_pages, v_pages, k, v, slots)[0].sum())(k)
    np.testing.assert_array_equal(gradient[:, 0, 0], [1, 0, 1])


def decode_step(implementation, k_pages, v_pages, q, k, v, slots, table, seq_lens, layer):
    """Writes, then attends on the returned pages."""
    pages = write_kv(k_pages, v_pages, k, v, slots, layer=layer, implementation=implementation)
    out = paged_attention(q, *pages, table, seq_lens, layer=layer, implementation=implementation)
    return pages, out


def decode_operands():
    """q, k, v, slots, page_table and seq_lens of two rows that fill page 1 and 3."""
    rng = np.random.default_rng(5)
    q = jnp.asarray(rng.standard_normal((2, 4, 16), "f4"))
    k = jnp.asarray(rng.standard_normal((2, 2, 16), "f4"))
    table = jnp.array([[1], [3]], jnp.int32)
    return q, k, -k, jnp.array([4, 12], jnp.int32), table, jnp.array([1, 1], jnp.int32)


def test_stacked_pool_rides_through_scan_and_while_loop(implementation):
    layers = jnp.arange(3, dtype=jnp.int32)
    k_pages, v_pages, *_ = write_operands(num_layers=3)
    q, *rest = decode_operands()
    step = functools.partial(decode_step, implementation)

    def body(carry, layer):
        pages, q = carry
        pages, out = step(*pages, q, *rest, layer)
        return (pages, q + out), None

    def looped(carry):
        for layer in range(3):
            carry, _ = body(carry, jnp.int32(layer))
        return carry

    def while_looped(carry):
        def loop(state):
            layer, carry = state
            return layer + 1, body(carry, layer)[0]

        return jax.lax.while_loop(lambda s: s[0] < 3, loop, (jnp.int32(0), carry))[1]

    start = ((k_pages, v_pages), q)
    expected = jax.jit(looped)(start)
    scanned = jax.jit(lambda carry: jax.lax.scan(body, carry, layers)[0])(start)
    for results in (scanned, jax.jit(while_looped)(start)):
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("donate", [False, True])
def test_an_exported_program_gives_the_same_bits(donate):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    k_pages, v_pages, *_ = write_operands(num_layers=3)
    operands = (k_pages, v_pages, *decode_operands(), jnp.int32(1))
    step = jax.jit(
        functools.partial(decode_step, "native"), donate_argnums=(0, 1) if donate else ()
    )
    checks = [
        export.DisabledSafetyCheck.custom_call(name) for name in jax_paged.build_info()["targets"]
    ]
    exported = export.export(step, disabled_checks=checks)(*operands)
    restored = export.deserialize(exported.serialize())
    expected = jax.jit(functools.partial(decode_step, "native"))(*operands)
    results = restored.call(*operands)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_needs_the_named_checks_disabled():
    k_pages, v_pages, *_ = write_operands(num_layers=3)
    operands = (k_pages, v_pages, *decode_operands(), jnp.int32(1))
    step = jax.jit(functools.partial(decode_step, "native"))
    with pytest.raises(ValueError, match=r"jax_paged\.(attention|write_kv)\.v1"):
        export.export(step)(*operands)


def test_nnx_jit_runs_a_module_that_attends(implementation):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.float32(2))

        def __call__(self, pages, q, *rest):
            return decode_step(implementation, *pages, self.scale[...] * q, *rest, jnp.int32(1))

    k_pages, v_pages, *_ = write_operands(num_layers=3)
    q, *rest = decode_operands()
    expected = decode_step(implementation, k_pages + 0, v_pages + 0, 2 * q, *rest, jnp.int32(1))

    @functools.partial(nnx.jit, donate_argnums=(1,))
    def step(module, pages, *rest):
        return module(pages, *rest)

    pages, out = step(Layer(), (k_pages, v_pages), q, *rest)
    assert k_pages.is_deleted()
    np.testing.assert_array_equal(out, expected[1])
    np.testing.assert_array_equal(pages[0], expected[0][0])
