# SPDX-License-Identifier: Apache-2.0
"""Layout "rpa": K and V in one pool, v_pages None. Beside the suites of all layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import (
    CascadeLevel,
    attention_plan,
    cascade_attention,
    convert_pages,
    copy_pages,
    explain,
    gather_kv,
    move_slots,
    page_attention_mass,
    paged_attention,
    qkv_norm_rope_write,
    ragged_paged_attention,
    write_kv,
)

TABLE, LENS = jnp.array([[3, 1], [5, 2]], jnp.int32), jnp.array([7, 3], jnp.int32)
CU = jnp.array([0, 4, 5], jnp.int32)
SLOTS = jnp.array([5, -1, 27, 4, 6], jnp.int32)


def pools(dtype="float32"):
    """K and V in "HND", and the same in one pool."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((7, 2, 4, 16)), dtype) for _ in range(2))
    return (k, v), convert_pages(k, v, "HND", "rpa")[0]


def queries(tokens=5, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, 6, 16), "f4"))


@pytest.mark.cuda
def test_qkv_norm_rope_write_leaves_what_it_leaves_in_two_pools(implementation):
    (k, v), pool = pools()
    qkv = jnp.asarray(np.random.default_rng(2).standard_normal((5, (6 + 2 + 2) * 16), "f4"))
    positions = jnp.array([3, 9, 2, 0, 99], jnp.int32)  # the last one has no angle
    angles = np.outer(np.arange(12), 0.3 ** np.arange(8)).astype("f4")
    rest = (positions, SLOTS, jnp.cos(angles), jnp.sin(angles))
    options = {
        "q_norm": jnp.ones(16, jnp.float32),
        "num_q_heads": 6,
        "implementation": implementation,
    }
    q, *pages = qkv_norm_rope_write(qkv, k, v, *rest, **options)
    q_one, one, nothing = qkv_norm_rope_write(qkv, pool, None, *rest, layout="rpa", **options)
    assert nothing is None
    np.testing.assert_allclose(q_one, q, rtol=2e-6, atol=2e-6)
    for mine, other in zip(convert_pages(one, None, "rpa", "HND"), pages, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-6)


def test_a_cascade_has_the_bits_of_two_pools():
    (k, v), pool = pools()
    levels = [
        CascadeLevel(TABLE[:1], jnp.array([8], jnp.int32), jnp.zeros(2, jnp.int32)),
        CascadeLevel(TABLE[::-1], LENS),
    ]
    q = queries(2)
    expected = cascade_attention(q, k, v, levels)
    np.testing.assert_array_equal(cascade_attention(q, pool, None, levels, layout="rpa"), expected)


def test_a_plan_and_explain_know_it():
    _, pool = pools()
    operands = (queries(), pool, None, TABLE, LENS, CU)
    plan = attention_plan(*operands, layout="rpa")
    out = ragged_paged_attention(*operands, layout="rpa", plan=plan)
    np.testing.assert_array_equal(out, ragged_paged_attention(*operands, layout="rpa"))
    told = explain(ragged_paged_attention, *operands, layout="rpa")
    (k, v), _ = pools()
    assert told == explain(ragged_paged_attention, queries(), k, v, TABLE, LENS, CU)


def test_gradients_of_k_and_v_meet_in_the_pool():
    (k, v), pool = pools()

    def total(k_pages, v_pages, layout):
        return jnp.sum(ragged_paged_attention(
            queries(), k_pages, v_pages, TABLE, LENS, CU, layout=layout) ** 2)  # fmt: skip

    expected = convert_pages(*jax.grad(total, (0, 1))(k, v, "HND"), "HND", "rpa")[0]
    got = jax.grad(total)(pool, None, "rpa")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert jnp.abs(got[..., 1::2, :]).max() > 0.01


TOKEN = jnp.zeros((5, 2, 16), jnp.float32)
ONE = jnp.zeros(1, jnp.int32)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: paged_attention(queries(2), p, p, TABLE, LENS, layout="rpa"),
        lambda p: ragged_paged_attention(queries(), p, p, TABLE, LENS, CU, layout="rpa"),
        lambda p: attention_plan(queries(), p, p, TABLE, LENS, CU, layout="rpa"),
        lambda p: write_kv(p, p, TOKEN, TOKEN, SLOTS, layout="rpa"),
        lambda p: gather_kv(p, p, TABLE, ONE, ONE, ONE, max_tokens=1, layout="rpa"),
        lambda p: move_slots(p, p, ONE, ONE, layout="rpa"),
    ],
    ids=["paged", "ragged", "plan", "write", "gather", "move"],
)
def test_a_pool_of_v_is_refused(call):
    message = r"^v_pages: expected None for layout 'rpa', whose k_pages hold V, got \[7, 4, 4, 16\]"
    with pytest.raises(ValueError, match=message):
        call(pools()[1])


def test_none_for_v_is_refused_elsewhere():
    (k, _), _ = pools()
    with pytest.raises(ValueError, match="v_pages: expected an array, got None"):
        paged_attention(queries(2), k, None, TABLE, LENS)
    with pytest.raises(ValueError, match=r"k_pages: expected .* with an odd number of rows"):
        copy_pages(k[:, :1].swapaxes(1, 2), None, ONE, ONE)


def test_the_share_of_each_page_is_that_of_two_pools():
    (k, _), pool = pools()
    got = page_attention_mass(queries(2), pool, TABLE, LENS, layout="rpa")
    np.testing.assert_array_equal(got, page_attention_mass(queries(2), k, TABLE, LENS))
