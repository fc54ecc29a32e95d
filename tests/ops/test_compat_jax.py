# SPDX-License-Identifier: Apache-2.0
"""Our op with the signature of JAX's ragged paged attention, against JAX's own jnp reference."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat import imported

from jax_paged.compat.jax import ragged_paged_attention
from jax_paged.testing import Case, is_in_place, make_batch

TOLERANCE = {"float32": 2e-6, "bfloat16": 0.02, "float16": 0.003}  # theirs rounds its weights


@pytest.fixture
def theirs():
    return imported("jax.experimental.pallas.ops.tpu.ragged_paged_attention")


def call_of(dtype="float32", page_size=4, seed=0):
    """Operands of a hostile batch: prefill, decode, a chunk, a dead row and padding."""
    case = Case("rpa", 6, 2, 16, page_size=page_size, layout="rpa")
    batch = make_batch(
        case, jnp.dtype(dtype), [9, 1, 3, 0], [9, 13, 7, 0], num_tokens=16, num_seqs=3, seed=seed
    )
    arrays = (batch.q, batch.k_pages, batch.seq_lens, batch.page_table, batch.cu_q_lens)
    return tuple(map(jnp.asarray, (*arrays, np.array([batch.num_seqs], np.int32))))


def reference(theirs, call, **options):
    """Their reference, of f32 where `call` is 8-bit, without its padding."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return np.asarray(theirs.ref_ragged_paged_attention(*call, **options), np.float32)


def check(theirs, call, dtype="float32", **options):
    out = np.asarray(ragged_paged_attention(*call, **options), np.float32)
    expected = reference(theirs, call, **options)
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=limit, atol=limit)
    assert np.abs(expected).max() > 0.1
    assert not out[len(expected) :].any()


def test_the_signature_is_theirs(theirs):
    ours, other = (
        {x.name: (x.kind, x.default) for x in inspect.signature(f).parameters.values()}
        for f in (ragged_paged_attention, theirs.ragged_paged_attention)
    )
    assert ours == other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_computes_what_theirs_does(theirs, dtype):
    check(theirs, call_of(dtype), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"sm_scale": 0.25},
        {"sm_scale": 0.25, "sliding_window": 5},
        {"sm_scale": 0.25, "soft_cap": 2.0, "mask_value": None},
        {"sm_scale": 0.25, "k_scale": 0.5, "v_scale": 3.0},
        {"num_kv_pages_per_block": 1, "num_queries_per_block": 8, "vmem_limit_bytes": 1 << 20},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_mean_what_theirs_do(theirs, options):
    known = inspect.signature(theirs.ref_ragged_paged_attention).parameters
    call = call_of()
    out = ragged_paged_attention(*call, **options)
    expected = reference(theirs, call, **{x: options[x] for x in options if x in known})
    np.testing.assert_allclose(out[: len(expected)], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kv", ["float8_e4m3fn", "int8"])
def test_pages_of_8_bits_have_scales(theirs, kv):
    q, pool, *rows = call_of("bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        pool = jnp.nan_to_num(pool * 30).astype(kv)
    check(theirs, (q, pool, *rows), "bfloat16", sm_scale=0.25, k_scale=0.03, v_scale=0.04)


def test_the_pool_is_read_where_it_lies():
    q, pool, *rows = call_of(page_size=16)
    compiled = ragged_paged_attention.lower(q, pool, *rows).compile()
    only_k = jax.ShapeDtypeStruct((pool.size // 2,), pool.dtype)
    assert only_k.size > q.size
    assert is_in_place(compiled, only_k)


ZEROS = functools.partial(jnp.zeros, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask_value": -1e4}, NotImplementedError, "mask_value: .*expected None or at most -1e"),
        ({"sliding_window": 0}, ValueError, "sliding_window: expected None or an int > 0, got 0"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap: expected None or a finite number > 0, got 0.0"),
        ({"vmem_limit_bytes": 0}, ValueError, "vmem_limit_bytes: expected None or an int > 0"),
        ({"kv_pages": ZEROS((3, 4, 3, 16))}, ValueError, "kv_pages: expected an even number"),
        ({"kv_pages": ZEROS((3, 4, 4, 8))}, ValueError, "q: expected head_dim=8 of kv_pages"),
        ({"kv_pages": ZEROS((3, 4, 4, 12))}, NotImplementedError, "kv_pages: native kernels"),
        ({"kv_pages": jnp.zeros((3, 4, 4, 16), "bfloat16")}, ValueError, "kv_pages: expected dty"),
        ({"kv_lens": jnp.zeros(4, "float32")}, ValueError, "kv_lens: expected dtype int32"),
        ({"num_seqs": jnp.int32(3)}, ValueError, r"num_seqs: expected shape \[1\]"),
        ({"cu_q_lens": jnp.zeros(4, "int32")}, ValueError, r"cu_q_lens: expected shape \[max_num"),
    ],
)  # fmt: skip
def test_what_it_lacks_is_refused_by_name(changes, error, message):
    names = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    with pytest.raises(error, match=message):
        ragged_paged_attention(**dict(zip(names, call_of(), strict=True)) | changes)
