# SPDX-License-Identifier: Apache-2.0
"""Our op with the signature of tokamax's, against tokamax's own jnp reference.

Without tokamax (Python 3.12 and on) what needs it is skipped.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat import imported

from jax_paged.compat.tokamax import batched_ragged_paged_attention
from jax_paged.testing import is_in_place

NAMES = (
    "queries", "keys", "values", "kv_cache", "kv_lens", "page_indices", "cu_q_lens",
    "distribution",
)  # fmt: skip
HEAD_DIM, WIDTH, PAGE = 16, 128, 4


@pytest.fixture
def theirs():
    """tokamax's op; its reference wants the usual promotion."""
    op = imported("tokamax.ops").batched_ragged_paged_attention

    def call(operands, **options):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return op(*operands.values(), implementation="reference", **options)

    call.op = op
    return call


def cache_of(rows, width, dtype="float32"):
    return jnp.zeros((17, PAGE, rows, width), dtype)


def call_of(dtype="float32", kv=None, seed=0):
    """Two decode rows, a prompt, a chunk, a row that is not there, and padding."""
    rng = np.random.default_rng(seed)
    q_lens, kv_lens, pages_per_seq = [1, 1, 6, 3], [5, 1, 6, 9, 7], 3
    ends = np.cumsum([0, *q_lens])
    tokens, pages = ends[-1] + 2, 17
    q, k, v = (rng.standard_normal((tokens, heads, HEAD_DIM)) for heads in (6, 2, 2))
    cache = np.zeros((pages, PAGE, 4, WIDTH))
    cache[..., :HEAD_DIM] = rng.standard_normal((pages, PAGE, 4, HEAD_DIM))
    kv = dtype if kv is None else kv
    return {
        "queries": jnp.asarray(q, dtype),
        "keys": jnp.asarray(k, dtype),
        "values": jnp.asarray(v, dtype),
        "kv_cache": jnp.asarray(cache, jnp.float32).astype(kv),
        "kv_lens": jnp.asarray(kv_lens, jnp.int32),
        "page_indices": jnp.asarray(rng.permutation(pages)[: 5 * pages_per_seq], jnp.int32),
        "cu_q_lens": jnp.asarray([*ends, ends[-1]], jnp.int32),
        "distribution": jnp.asarray([2, 3, 4], jnp.int32),
    }


def ours(operands, **options):
    copied = operands | {"kv_cache": jnp.array(operands["kv_cache"])}  # which is donated
    return batched_ragged_paged_attention(**copied, **options)


def same(operands, theirs, limit=2e-6, **options):
    """Compares both ops: outputs and logarithms closely, the cache bit for bit."""
    mine = ours(operands, return_lse=True, **options)
    other = theirs(operands, return_lse=True, **options)
    for got, expected in zip(mine[::2], other[::2], strict=True):
        assert got.dtype == expected.dtype
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=limit, atol=limit)
    np.testing.assert_array_equal(*(np.asarray(x[1], np.float32) for x in (mine, other)))
    assert (np.asarray(mine[1]) != np.asarray(operands["kv_cache"])).any() or options.get(
        "skip_kv_update"
    )


def test_the_signature_is_theirs(theirs):
    def told(value):  # of tokamax's enums, which may be given as strings
        return str(value).upper() if isinstance(value, str) else value

    mine, other = (
        {x.name: (x.kind, told(x.default)) for x in inspect.signature(f).parameters.values()}
        for f in (batched_ragged_paged_attention, theirs.op)
    )
    assert mine == other


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("bfloat16", 0.03)])
def test_it_computes_and_writes_what_theirs_does(theirs, dtype, limit):
    same(call_of(dtype), theirs, limit)


@pytest.mark.parametrize(
    "options",
    [
        {"sm_scale": 0.25},
        {"sm_scale": 0.25, "sliding_window": 3},
        {"sm_scale": 0.25, "soft_cap": 2.0, "mask_value": -1e38},
        {"sm_scale": 0.25, "use_causal_mask": False},
        {"skip_kv_update": True},
        {"decode_query_size": 2, "vmem_limit_bytes": 1 << 20},
        {"kv_layout": "HEAD_ALONG_SUBLANE", "attention_scope": "FULL"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_mean_what_theirs_do(theirs, options):
    same(call_of(), theirs, **options)


def test_scales_are_those_of_the_kernel(theirs):
    """They multiply what is stored, as in tokamax's TPU kernel; its reference divides by them.

    Nor does the reference mix dtypes: it gets all in f32.
    """
    scales = {"k_scale": 0.5, "v_scale": 4.0, "sm_scale": 0.25}
    of_theirs = scales | {"k_scale": 2.0, "v_scale": 0.25}
    for operands in (call_of(), call_of(kv="float8_e4m3fn"), call_of(kv="float8_e5m2")):
        kv = operands["kv_cache"].dtype
        operands |= {name: operands[name].astype(kv) for name in ("keys", "values")}
        wide = {
            name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in operands.items()
        }
        mine = ours(operands, return_lse=True, **scales)
        other = theirs(wide, return_lse=True, **of_theirs)
        for got, expected in zip(mine[::2], other[::2], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert mine[1].dtype == kv
        np.testing.assert_array_equal(mine[1].astype(jnp.float32), other[1])


def test_the_first_token_of_a_row_is_its_value():
    operands = call_of()
    out, cache = ours(operands)
    page = int(operands["page_indices"][3])  # of row 1, whose only token is the second
    expected = np.asarray(operands["values"][1])
    np.testing.assert_allclose(out[1], expected.repeat(3, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(cache[page, 0, 1::2, :HEAD_DIM], expected)
    np.testing.assert_array_equal(cache[page, 0, 0::2, :HEAD_DIM], operands["keys"][1])
    assert not np.asarray(cache[..., HEAD_DIM:]).any()


def test_native_and_reference_agree_and_write_the_same_bits():
    results = [ours(call_of(), return_lse=True, implementation=x) for x in ("native", "reference")]
    for i, (native, reference) in enumerate(zip(*results, strict=True)):
        limit = 0 if i == 1 else 2e-6
        np.testing.assert_allclose(native, reference, rtol=limit, atol=limit)


def test_a_cache_with_packed_rows_is_the_same_cache():
    operands = call_of("bfloat16")
    cache = operands["kv_cache"]
    packed = operands | {"kv_cache": cache.reshape(*cache.shape[:2], 2, 2, WIDTH)}
    (out, plain), (out_packed, new) = ours(operands), ours(packed)
    assert new.shape == packed["kv_cache"].shape
    for a, b in ((out, out_packed), (plain, new.reshape(cache.shape))):
        np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))


def test_wild_pages_and_lengths_are_left_out():
    operands = call_of()
    wild = jnp.array([-1, 999, 2**31 - 1], jnp.int32)
    pages = operands["page_indices"].at[jnp.array([0, 4, 8])].set(wild)
    lens = operands["kv_lens"].at[2].set(2**31 - 1).at[3].set(-5)
    out, cache = ours(operands | {"page_indices": pages, "kv_lens": lens})
    assert np.isfinite(np.asarray(out)).all()
    changed = (np.asarray(cache) != np.asarray(operands["kv_cache"])).any((-1, -2)).sum()
    assert changed == 2  # the decode rows write; the others stand beyond the table, or before 0


def test_the_cache_is_updated_in_place():
    operands = call_of()
    address = operands["kv_cache"].unsafe_buffer_pointer()
    _, cache = batched_ragged_paged_attention(**operands)
    assert cache.unsafe_buffer_pointer() == address
    assert operands["kv_cache"].is_deleted()

    def step(cache, operands):
        return batched_ragged_paged_attention(**operands, kv_cache=cache)[::-1]

    operands = call_of()
    cache = operands.pop("kv_cache")
    compiled = jax.jit(step, donate_argnums=0).lower(cache, operands).compile()
    assert is_in_place(compiled, cache)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_scale": 0.5}, NotImplementedError, "q_scale: expected None, got 0.5"),
        ({"chunk_prefill_size": 8}, NotImplementedError, "chunk_prefill_size: expected None"),
        ({"debug_mode": True}, NotImplementedError, "debug_mode: expected False"),
        ({"cp_group_size": 2}, NotImplementedError, "cp_group_size: expected None"),
        ({"cp_rank": np.int32(0)}, NotImplementedError, "cp_rank: expected None"),
        ({"kv_layout": "SEQ_ALONG_LANE"}, NotImplementedError, "kv_layout: expected HEAD_ALONG"),
        ({"attention_scope": "CACHE_ONLY"}, NotImplementedError, "attention_scope: expected FULL"),
        ({"implementation": "mosaic_tpu"}, NotImplementedError, "implementation: expected None"),
        ({"out_dtype": "float16"}, NotImplementedError, "out_dtype: expected float32 of queries"),
        ({"mask_value": -1e9}, NotImplementedError, "mask_value: .*expected None or at most -1e"),
        ({"sliding_window": 0}, ValueError, "sliding_window: expected None or an int > 0, got 0"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap: expected None or a finite number > 0"),
        ({"kv_cache": cache_of(6, 128)}, ValueError, "keys: expected shape .*heads=3"),
        ({"kv_cache": cache_of(4, 8)}, ValueError, "kv_cache: expected rows of head_dim"),
        ({"kv_cache": cache_of(4, 20)}, NotImplementedError, "kv_cache: native kernels"),
        ({"kv_cache": cache_of(4, 128, "float16")}, ValueError, "kv_cache: expected dty"),
        ({"kv_cache": cache_of(4, 128, "int8")}, ValueError, "keys dtype: expected 'int"),
        ({"page_indices": jnp.zeros(14, "int32")}, ValueError, "page_indices: expected as many"),
        ({"distribution": jnp.zeros(2, "int32")}, ValueError, r"distribution: expected shape \[3"),
        ({"kv_lens": jnp.zeros(5, "float32")}, ValueError, "kv_lens: expected dtype int32"),
    ],
)  # fmt: skip
def test_what_it_lacks_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        batched_ragged_paged_attention(**call_of() | changes)
