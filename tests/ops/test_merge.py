# SPDX-License-Identifier: Apache-2.0
"""merge_attention_states: two parts of a history give attention over the whole of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged
from jax_paged import merge_attention_states, paged_attention
from jax_paged.testing import TOLERANCES, Case, assert_attention_close, dense_oracle, make_batch

pytestmark = pytest.mark.cuda
INF = np.inf
DTYPES = list(TOLERANCES)


@pytest.fixture
def merge(implementation):
    """The op on numpy arrays."""

    def call(*parts):
        merged = merge_attention_states(*map(jnp.asarray, parts), implementation=implementation)
        return tuple(map(np.asarray, merged))

    return call


def make_parts(dtype, tokens=7, num_q_heads=3, head_dim=24, seed=0):
    """Two random parts; lse from −40 to 40, so that either part may be all that counts."""
    rng = np.random.default_rng(seed)
    shape = (tokens, num_q_heads, head_dim)
    return [
        part
        for _ in range(2)
        for part in (
            rng.standard_normal(shape, "f4").astype(jnp.dtype(dtype)),
            rng.uniform(-40, 40, shape[:2]).astype("f4"),
        )
    ]


def oracle(out_a, lse_a, out_b, lse_b):
    """The formula in float64, as it stands in the docstring; no part may be empty."""
    lse_a, lse_b = lse_a.astype("f8"), lse_b.astype("f8")
    lse = np.logaddexp(lse_a, lse_b)
    weights = np.exp(lse_a - lse)[..., None], np.exp(lse_b - lse)[..., None]
    return weights[0] * out_a.astype("f8") + weights[1] * out_b.astype("f8"), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128, 512])
def test_merge_equals_the_formula_in_float64(head_dim, dtype, merge):
    parts = make_parts(dtype, head_dim=head_dim)
    assert_attention_close(*merge(*parts), *oracle(*parts))


def test_many_heads_are_shared_among_threads():
    parts = make_parts("float32", tokens=300, num_q_heads=32, head_dim=64)
    out, lse = merge_attention_states(*map(jnp.asarray, parts), implementation="native")
    assert_attention_close(out, lse, *oracle(*parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_close_lse_give_the_mean_and_rounding_is_to_nearest_even(dtype, merge):
    out_a, lse_a, out_b, lse_b = make_parts(dtype)
    lse_b = lse_a
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    mean = (out_a.astype("f4") + out_b.astype("f4")) / 2
    np.testing.assert_array_equal(out, mean.astype(out.dtype))
    np.testing.assert_allclose(lse, lse_a + np.log(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_part_gives_the_other_bit_for_bit_whatever_its_out_holds(dtype, merge):
    out_a, lse_a, out_b, lse_b = make_parts(dtype)
    lse_a[::2], lse_b[1::3], out_a[::2], out_b[1::3] = -INF, -INF, np.nan, np.inf
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    empty_a, empty_b = np.isneginf(lse_a), np.isneginf(lse_b)
    assert (empty_a & empty_b).any()
    for only, part, part_lse in [
        (empty_a & ~empty_b, out_b, lse_b), (empty_b & ~empty_a, out_a, lse_a),
    ]:  # fmt: skip
        assert only.any()
        np.testing.assert_array_equal(out[only], part[only])
        np.testing.assert_array_equal(lse[only], part_lse[only])
    np.testing.assert_array_equal(out[empty_a & empty_b], 0)
    np.testing.assert_array_equal(lse[empty_a & empty_b], -INF)
    assert not np.isnan(out.astype("f4")).any()


@pytest.mark.parametrize("wrong", [INF, np.nan])
def test_an_infinite_or_nan_lse_shows_as_nan_unless_the_other_part_is_empty(wrong, merge):
    out_a, lse_a, out_b, lse_b = make_parts("float32", tokens=4)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = wrong, wrong, wrong, -INF
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    assert np.isnan(out[:2]).all()
    assert np.isnan(lse[:2]).all()
    np.testing.assert_array_equal(out[2], out_a[2])
    np.testing.assert_array_equal(lse[2], lse_a[2])
    assert np.isfinite(out[3]).all()


def test_large_lse_do_not_overflow(merge):
    parts = make_parts("float32")
    moved = [parts[0], parts[1] + np.float32(2**20), parts[2], parts[3] + np.float32(2**20)]
    out, lse = merge(*moved)
    expected, expected_lse = oracle(*moved)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1, 48, 100])
def test_parts_of_a_history_merge_to_attention_over_all_of_it(cut, dtype, implementation):
    case = Case("cut", 8, 2, 64)
    batch = make_batch(case, jnp.dtype(dtype), [1, 1, 1], [100, 33, 0])
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    attend = functools.partial(paged_attention, return_lse=True, implementation=implementation)
    # The second part begins at a page: its row of the table is the rest of the pages.
    pages = cut // case.page_size
    whole = pages * case.page_size
    first = attend(q, k_pages, v_pages, table, jnp.minimum(seq_lens, whole))
    rest = attend(q, k_pages, v_pages, table[:, pages:], jnp.maximum(seq_lens - whole, 0))
    merged = merge_attention_states(*first, *rest, implementation=implementation)
    out, lse = dense_oracle(batch)
    tolerance = 2 * TOLERANCES[dtype][0]  # out of both parts is rounded, and the sum again
    np.testing.assert_allclose(merged[1], lse, rtol=0, atol=2e-5)
    got = np.asarray(merged[0]).astype("f8")
    norm = np.linalg.norm(out, axis=-1)
    assert (np.linalg.norm(got - out, axis=-1) <= tolerance * norm).all()


def test_no_tokens_merge_to_no_tokens(implementation):
    parts = [jnp.asarray(x[:0]) for x in make_parts("float32")]
    out, lse = merge_attention_states(*parts, implementation=implementation)
    assert (out.shape, lse.shape) == ((0, 3, 24), (0, 3))


@pytest.mark.cuda(deep=True)
def test_gradients_are_those_of_the_formula_and_finite_beside_empty_parts(implementation):
    parts = make_parts("float32")
    parts[1] /= 20
    parts[3] /= 20
    parts[1][::2], parts[3][1::3], parts[0][::2] = -INF, -INF, np.nan

    def loss(merged):
        out, lse = merged
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) ** 2)

    def plain(out_a, lse_a, out_b, lse_b):
        # Masked by hand, as the op promises to.
        full = ~(jnp.isneginf(lse_a) | jnp.isneginf(lse_b))
        lse = jnp.where(full, jnp.logaddexp(*(jnp.where(full, x, 0) for x in (lse_a, lse_b))), 0)
        a = jnp.exp(jnp.where(full, lse_a, 0) - lse)[..., None] * jnp.nan_to_num(out_a)
        b = jnp.exp(jnp.where(full, lse_b, 0) - lse)[..., None] * jnp.nan_to_num(out_b)
        alone_b, alone_a = jnp.isneginf(lse_a), jnp.isneginf(lse_b)
        one = jnp.where(alone_b[..., None], out_b, jnp.nan_to_num(out_a))
        one = jnp.where((alone_a & alone_b)[..., None], 0, one)
        out = jnp.where(full[..., None], a + b, one)
        return out, jnp.where(full, lse, jnp.where(alone_b, lse_b, lse_a))

    merge = functools.partial(merge_attention_states, implementation=implementation)
    operands = tuple(map(jnp.asarray, parts))
    grads, expected = (
        jax.grad(lambda *x, f=f: loss(f(*x)), argnums=(0, 1, 2, 3))(*operands)
        for f in (merge, plain)
    )
    for got, want in zip(grads, expected, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    empty_a = np.isneginf(parts[1])
    np.testing.assert_array_equal(grads[0][empty_a], 0)
    np.testing.assert_array_equal(grads[1][empty_a], 0)


@pytest.mark.cuda(deep=True)
@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (0, 0, None, None), (None, 1, 2, None)], ids=str)
def test_vmap_equals_the_loop(in_axes, implementation):
    merge = functools.partial(merge_attention_states, implementation=implementation)
    parts, stacked = [list(map(jnp.asarray, make_parts("float32", seed=s))) for s in range(3)], []
    for i, axis in enumerate(in_axes):
        x = [part[i] for part in parts]
        stacked.append(x[0] if axis is None else jnp.stack(x, axis))
    out, lse = jax.jit(jax.vmap(merge, in_axes=in_axes))(*stacked)
    for s in range(3):
        one = merge(*(parts[0 if a is None else s][i] for i, a in enumerate(in_axes)))
        np.testing.assert_array_equal(out[s], one[0])
        np.testing.assert_array_equal(lse[s], one[1])


@pytest.mark.cuda(deep=True)
def test_jit_and_donation_give_the_bits_of_the_eager_call(implementation):
    merge = functools.partial(merge_attention_states, implementation=implementation)
    parts = list(map(jnp.asarray, make_parts("bfloat16")))
    expected = merge(*parts)
    donated = jax.jit(merge, donate_argnums=(0, 1))(*parts)
    for a, b in zip(donated, expected, strict=True):
        np.testing.assert_array_equal(a, b)


OUT, LSE = jnp.zeros((2, 3, 16), jnp.float32), jnp.zeros((2, 3), jnp.float32)
WRONG = [
    ((OUT[0], LSE, OUT, LSE),
     r"out_a: expected shape \[tokens, num_q_heads, head_dim\], got \[3, 16\]"),
    ((OUT, LSE, OUT[:1], LSE),
     r"out_b: expected shape \[tokens=2, num_q_heads=3, head_dim=16\], got \[1, 3, 16\]"),
    ((OUT, LSE[:, :2], OUT, LSE),
     r"lse_a: expected shape \[tokens=2, num_q_heads=3\], got \[2, 2\]"),
    ((OUT, LSE, OUT, LSE[:1]),
     r"lse_b: expected shape \[tokens=2, num_q_heads=3\], got \[1, 3\]"),
    ((OUT, LSE, OUT.astype("bfloat16"), LSE), "out_b: expected dtype float32, got bfloat16"),
    ((OUT.astype(int), LSE, OUT, LSE), "out_a: expected dtype bfloat16 or float16 or float32"),
    ((OUT, LSE.astype("float16"), OUT, LSE), "lse_a: expected dtype float32, got float16"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: None)
def test_a_wrong_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        merge_attention_states(*arguments)


def test_a_head_dim_that_only_the_reference_takes_is_named():
    out, lse = jnp.ones((1, 1, 5), jnp.float32), jnp.zeros((1, 1), jnp.float32)
    with pytest.raises(NotImplementedError, match="out_a: native kernels take a head_dim"):
        merge_attention_states(out, lse, out, lse)
    merged, _ = merge_attention_states(out, lse, out, lse, implementation="reference")
    np.testing.assert_array_equal(merged, 1)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3, 16), (2, 3), (2, 3, 8), (2, 3)], "out_b expected shape"),
        ([(2, 3, 16), (2, 2), (2, 3, 16), (2, 3)], "lse_a expected shape"),
        ([(2, 3, 12), (2, 3), (2, 3, 12), (2, 3)], "out_a expected head_dim a multiple of 8"),
    ],
)
def test_the_handler_defends_itself(shapes, message):
    call = jax.ffi.ffi_call(
        "jax_paged.merge_attention_states.v1",
        [jax.ShapeDtypeStruct(shapes[0], jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32)],
    )
    with pytest.raises(Exception, match=f"jax_paged.merge_attention_states: {message}"):
        jax.block_until_ready(call(*(jnp.zeros(shape, jnp.float32) for shape in shapes)))


def test_explain_names_the_target():
    plan = jax_paged.explain("merge_attention_states", OUT, LSE, OUT, LSE)
    assert plan["implementation"] == "native"
    assert plan["target"] == "jax_paged.merge_attention_states.v1"
