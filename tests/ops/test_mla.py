# SPDX-License-Identifier: Apache-2.0
"""mla_paged_attention: one latent row per token is K and V of all heads."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import on_devices

from jax_paged import explain, mla_paged_attention, write_mla_kv
from jax_paged.testing import (
    TOLERANCES,
    assert_attention_close,
    dense_oracle,
    pool_sized_ops,
)
from jax_paged.testing.mla import attend, eight_bit, make_mla
from jax_paged.testing.options import random_parents, trees_of

pytestmark = pytest.mark.cuda
SIZES = [(576, 512), (48, 32), (64, 64), (24, 24), (40, 8), (8, 8)]  # latent + rope, latent
kernels = pytest.mark.parametrize("implementation", ["native", "emulated"])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_attention_with_v_the_front_of_k(sizes, dtype, causal, implementation):
    rows = [1, 0, 7, 1], [70, 9, 30, 0]
    batch = make_mla(*sizes, 5, *rows, dtype=dtype, num_tokens=12, causal=causal)
    assert_attention_close(*attend(batch, implementation=implementation), *dense_oracle(batch))


@kernels
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_heads_and_dtypes_at_deepseek_sizes(heads, dtype, implementation):
    batch = make_mla(576, 512, heads, [1, 2], [200, 33], dtype=dtype, page_size=64, num_layers=2)
    assert_attention_close(*attend(batch, implementation=implementation), *dense_oracle(batch))


@kernels
@pytest.mark.parametrize("options", [{"num_kv_splits": 3}, {"split_tokens": 64}], ids=str)
def test_splits(options, implementation):
    batch = make_mla(48, 32, 4, [1, 9], [300, 130])
    result = attend(batch, **options, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch))


OPTIONS = {
    "window": {"sliding_window": 9},
    "windows of rows": {"sliding_window": np.array([5, 0, 40], "i4")},
    "slid": {
        "sliding_window": np.array([20, 7, 30], "i4"), "num_pinned": np.array([4, 0, 9], "i4"),
        "slot_offset": np.array([16, 8, 24], "i4"),
    },
    "logits": {
        "soft_cap": 2.0, "alibi_slopes": np.linspace(0.01, 0.5, 5, dtype="f4"),
        "sinks": np.linspace(-1, 2, 5, dtype="f4"),
    },
    "sinks": {"sinks": np.linspace(-1, 2, 5, dtype="f4")},
    "fp8 output": {"out_dtype": "float8_e4m3fn", "out_scale": np.float32(0.05)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_takes_the_options_of_attention(name, tree, dtype, implementation):
    options = dict(OPTIONS[name])
    batch = make_mla(48, 32, 5, [3, 1, 12], [60, 20, 90], dtype=dtype, num_tokens=18)
    if tree:
        rng = np.random.default_rng(5)
        options |= trees_of([random_parents(rng, size, "forest") for size in (7, 2, 12)])
    given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    out, lse = attend(batch, **given, implementation=implementation)
    out_dtype = options.pop("out_dtype", None)
    if out_dtype is not None:
        assert out.dtype == out_dtype
        scale = options.pop("out_scale")
        want, _ = attend(batch, **{k: given[k] for k in options}, implementation=implementation)
        codes = (np.asarray(want, "f4") / scale).astype(jnp.dtype(out_dtype))
        np.testing.assert_allclose(np.float32(out), np.float32(codes), rtol=0.13, atol=2**-8)
        return
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


def test_wild_values_dead_rows_and_layers_out_of_range(implementation):
    batch = make_mla(24, 16, 3, [2, 1, 1], [40, 20, 5], num_seqs=2, num_tokens=9, num_layers=3)
    result = attend(batch, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch))
    for layer in jnp.array([-1, 3]):
        out, lse = attend(batch, layer=layer, implementation=implementation)
        np.testing.assert_array_equal(out, 0)
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("sizes", [(512, 64, 128, 128, 16), (32, 8, 24, 16, 4)], ids=str)
def test_it_equals_multi_head_attention_with_the_weights_not_absorbed(sizes):
    latent, rope, nope, v_dim, heads = sizes
    rng = np.random.default_rng(0)
    length, q_len, page = 75, 3, 16
    w_uk = rng.standard_normal((heads, nope, latent)) / latent**0.5
    w_uv = rng.standard_normal((heads, v_dim, latent)) / latent**0.5
    # What is stored is what both sides see.
    rows = rng.standard_normal((length, latent + rope)).astype("f4").astype("f8")
    q = rng.standard_normal((q_len, heads, nope + rope))
    sm_scale = (nope + rope) ** -0.5

    c, r = rows[:, :latent], rows[:, latent:]
    k = np.concatenate(
        [np.einsum("hnl,jl->jhn", w_uk, c), np.broadcast_to(r[:, None], (length, heads, rope))], 2
    )
    logits = np.einsum("thd,jhd->htj", q, k) * sm_scale
    hidden = np.arange(length)[None] > length - q_len + np.arange(q_len)[:, None]
    weights = np.exp(np.where(hidden[None], -np.inf, logits - logits.max(-1, keepdims=True)))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("htj,hvl,jl->thv", weights, w_uv, c)

    absorbed = np.concatenate([np.einsum("thn,hnl->thl", q[..., :nope], w_uk), q[..., nope:]], 2)
    pages = rng.permutation(7)[:5]
    slots = pages[np.arange(length) // page] * page + np.arange(length) % page
    kv_pages = jnp.full((7, page, latent + rope), jnp.nan, jnp.float32)
    kv_pages = write_mla_kv(kv_pages, jnp.asarray(rows, jnp.float32), slots)
    out = mla_paged_attention(
        jnp.asarray(absorbed, jnp.float32), kv_pages, pages[None], np.array([length]),
        np.array([0, q_len]), sm_scale=sm_scale, v_head_dim=latent,
    )  # fmt: skip
    mine = np.einsum("thl,hvl->thv", np.asarray(out, "f8"), w_uv)
    np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("sizes", [(576, 512), (40, 32), (64, 64)], ids=str)
def test_8_bit_rows_are_read_times_their_scale(sizes, kv_dtype, dtype, implementation):
    for rows in ([1, 1], [70, 30]), ([1, 30, 0], [70, 30, 0]):
        batch = make_mla(*sizes, 16, *rows, dtype=dtype, num_tokens=40)
        scale = np.float32(0.03 if kv_dtype == "int8" else 0.1)
        stored, real = eight_bit(batch, kv_dtype, scale)
        result = attend(stored, kv_scale=scale, implementation=implementation)
        assert_attention_close(*result, *dense_oracle(real))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_8_bit_rows_are_written_divided_by_the_scale_of_their_layer(kv_dtype):
    kv = jnp.float32(np.linspace(-900, 900, 16).reshape(2, 8))
    kv_pages, scale = jnp.zeros((2, 3, 4, 8), kv_dtype), np.float32([7.0, 2.0])
    written = write_mla_kv(kv_pages, kv, np.array([5, -1]), layer=1, kv_scale=scale)
    limit = 127 if kv_dtype == "int8" else float(jnp.finfo(kv_dtype).max)
    expected = np.clip(np.asarray(kv[0]) / 2, -limit, limit)
    expected = (np.rint(expected) if kv_dtype == "int8" else expected).astype(jnp.dtype(kv_dtype))
    np.testing.assert_array_equal(np.float32(written[1, 1, 1]), np.float32(expected))
    assert not np.float32(written[0]).any()


def test_gradients_are_those_of_the_reference():
    batch = make_mla(24, 16, 3, [2, 1], [10, 13])
    (q, k_pages, _, *rows), _ = batch.ragged()
    kv_pages = jnp.where(jnp.isnan(k_pages), jnp.float32(0), k_pages)[:, 0]

    def loss(implementation, q, kv_pages, sm_scale):
        out, lse = mla_paged_attention(
            q, kv_pages, *rows, sm_scale=sm_scale, v_head_dim=16, return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out**2) + jnp.sum(lse)

    arguments = (q, kv_pages, jnp.float32(0.3))
    native, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1, 2)))(*arguments)
        for name in ("native", "reference")
    )
    for mine, theirs in zip(native, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        assert np.abs(mine).max() > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_writes_are_in_place_and_reads_copy_nothing(dtype):
    pool = jax.ShapeDtypeStruct((2, 512, 16, 24), dtype)

    def step(kv_pages, kv, q):
        for layer in range(2):
            kv_pages = write_mla_kv(kv_pages, kv, jnp.array([3, -1, 40]), layer=layer)
            out = mla_paged_attention(
                q, kv_pages, jnp.array([[0, 2]]), jnp.array([20]), jnp.array([0, 3]),
                sm_scale=1.0, v_head_dim=16, layer=layer,
            )  # fmt: skip
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 8)))
            kv = q[:, 0]  # each write depends on the reads before it
        return kv_pages, q

    operands = (pool, jnp.ones((3, 24), dtype), jnp.ones((3, 4, 24), dtype))
    compiled = jax.jit(step, donate_argnums=0).lower(*operands).compile()
    written = pool_sized_ops(compiled, pool)
    assert not [line for line in written if " copy(" in line or " select(" in line], written
    memory, pool_bytes = compiled.memory_analysis(), 2 * 512 * 16 * 24 * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    if jax.default_backend() == "cpu":  # on CUDA partial results of units take as much
        assert memory.temp_size_in_bytes < pool_bytes // 8


def test_write_skips_bad_slots_and_the_last_of_equal_slots_wins():
    kv = jnp.arange(6, dtype=jnp.float32)[:, None] * jnp.ones((6, 8), jnp.float32)
    slots = jnp.array([5, -1, 8, 5, 2**31 - 1, 0])
    written = np.asarray(write_mla_kv(jnp.full((2, 4, 8), -7.0, jnp.float32), kv, slots))
    expected = np.full((2, 4, 8), -7.0)
    expected[1, 1], expected[0, 0] = 3, 5
    np.testing.assert_array_equal(written, expected)
    stacked = write_mla_kv(jnp.zeros((2, 2, 4, 8), jnp.bfloat16), kv, slots, layer=jnp.int32(5))
    np.testing.assert_array_equal(stacked, 0)


def test_explain_names_the_target():
    batch = make_mla(24, 16, 3, [2, 1], [10, 13])
    (q, k_pages, _, *rows), _ = batch.ragged()
    plan = explain("mla_paged_attention", q, k_pages[:, 0], *rows, sm_scale=1.0, v_head_dim=16)
    assert plan["target"] == "jax_paged.attention.v1"
    assert plan["kernels"] == ["decode", "decode"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"v_head_dim": 32}, ValueError, r"v_head_dim: expected at most latent\+rope=24, got 32"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim: expected an int >= 1, got 0"),
        ({"v_head_dim": 12}, NotImplementedError, "v_head_dim: native kernels take a multiple"),
        (
            {"kv_pages": jnp.ones((2, 4, 1, 24, 1), jnp.float32)},
            ValueError,
            r"kv_pages: expected \[num_page",
        ),
        ({"layer": 0}, ValueError, "layer: expected an i32 scalar for stacked pages"),
        (
            {"q": jnp.ones((1, 2, 16), jnp.float32)},
            ValueError,
            r"q: expected shape \[tokens, num_q_heads, lat",
        ),
        ({"q": jnp.ones((1, 2, 24), "bfloat16")}, ValueError, "kv_pages: expected dtype bfloat16"),
        ({"sm_scale": float("nan")}, ValueError, "sm_scale: expected a finite scale"),
        ({"kv_scale": 2.0}, ValueError, "kv_scale: expected None for pages of float32"),
        (
            {"kv_pages": jnp.ones((2, 4, 24), "int8"), "kv_scale": jnp.ones(2, jnp.float32)},
            ValueError,
            r"kv_scale: expected a scalar, got \[2\]",
        ),
        ({"num_kv_splits": 2, "split_tokens": 2}, ValueError, "split_tokens: expected None when"),
    ],
)
def test_wrong_arguments_are_named(change, error, text):
    arguments = {
        "q": jnp.ones((1, 2, 24), jnp.float32),
        "kv_pages": jnp.ones((2, 4, 24), jnp.float32),
        "page_table": jnp.array([[1]]),
        "seq_lens": jnp.array([3]),
        "cu_q_lens": jnp.array([0, 1]),
        "sm_scale": 1.0,
        "v_head_dim": 16,
    }
    with pytest.raises(error, match=text):
        mla_paged_attention(**{**arguments, **change})


SPLIT_HEADS = """
import re, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_paged import mla_paged_attention

keys = jax.random.split(jax.random.key(0))
q = jax.random.normal(keys[0], (3, 4, 24), "f4")
kv_pages = jax.random.normal(keys[1], (6, 8, 24), "f4")
rows = np.array([[0, 1], [2, 3]]), np.array([9, 12]), np.array([0, 1, 3])
sinks, slopes = np.float32([1, -1, 2, 0]), np.float32([0.1, 0.5, 0.2, 0.4])
attend = jax.jit(lambda *x: mla_paged_attention(
    *x, *rows, sm_scale=0.3, v_head_dim=16, sinks=sinks, alibi_slopes=slopes, kv_scale=None))
expected = attend(q, kv_pages)
mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
split = jax.device_put(q, NamedSharding(mesh, P(None, "heads")))
whole = jax.device_put(kv_pages, NamedSharding(mesh, P()))
out = attend(split, whole)
np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
assert out.sharding.spec == P(None, "heads"), out.sharding
text = attend.lower(split, whole).compile().as_text()
print(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)", text))
"""


def test_heads_of_q_may_be_split_over_devices():
    run = subprocess.run(
        [sys.executable, "-P", "-c", SPLIT_HEADS],
        env=on_devices(2), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[]\n"
