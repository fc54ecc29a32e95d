# SPDX-License-Identifier: Apache-2.0
"""page_attention_mass: each page's share of the softmax, against float64 and hostile batches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import page_attention_mass
from jax_paged.layout import LAYOUTS
from jax_paged.testing import WILD_PAGE, Case, dense_oracle, make_batch
from jax_paged.testing.options import draw_sinks, eight_bit, poison, with_holes

SEQ_LENS = [0, 1, 16, 17, 47, 100]


def decode_batch(dtype="float32", seed=0, num_layers=None, **sizes):
    """One query a row, over pages in random order; whatever is not the rows' is NaN."""
    sizes = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "page_size": 16} | sizes
    case = Case("mass", num_layers=num_layers, **sizes)
    return make_batch(case, jnp.dtype(dtype), [1] * len(SEQ_LENS), SEQ_LENS, seed=seed)


def mass(batch, **options):
    given = {
        "layer": None if batch.layer is None else jnp.int32(batch.layer),
        "sm_scale": jnp.float32(batch.sm_scale), "layout": batch.case.layout,
    }  # fmt: skip
    given |= {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    q, k_pages, _, page_table, seq_lens = batch.operands()
    return np.asarray(page_attention_mass(q, k_pages, page_table, seq_lens, **given))


def oracle(batch, **options):
    """exp(lse of a page − lse of all), each by itself: the other pages are holes of the table."""
    sinks = options.pop("sinks", None)
    _, total = dense_oracle(batch, sinks=sinks, **options)
    width = batch.page_table.shape[1]
    pages = []
    for page in range(width):
        table = np.where(np.arange(width) == page, batch.page_table, -1)
        _, lse = dense_oracle(dataclasses.replace(batch, page_table=table), **options)
        pages.append(np.exp(lse - np.where(np.isneginf(total), 0, total)))
    return np.stack(pages, -1)


def assert_mass(got, expected):
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(got[expected == 0], 0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, "moderate", "large"])
@pytest.mark.parametrize("num_layers", [None, 2])
def test_mass_is_each_pages_share_in_float64(
    dtype, layout, page_size, soft_cap, sinks, num_layers, implementation
):
    batch = decode_batch(dtype, page_size=page_size, layout=layout, num_layers=num_layers)
    options = {"soft_cap": soft_cap}
    if sinks is not None:
        options["sinks"] = draw_sinks(sinks, 6, np.random.default_rng(1))
    assert_mass(mass(batch, implementation=implementation, **options), oracle(batch, **options))


WINDOWS = [
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"sliding_window": 2**31 - 1},
    {"sliding_window": -1},
    {"sliding_window": np.array([0, 1, 5, 16, 30, 33], np.int32)},
    {"sliding_window": 24, "num_pinned": 4},
    {"sliding_window": 3, "num_pinned": 40},
    {"sliding_window": 24, "num_pinned": np.array([0, 1, 20, 4, 16, 19], np.int32)},
    {"sliding_window": 24, "num_pinned": 6, "slot_offset": np.array([0, 0, 0, 0, 16, 48], "i4")},
    {"slot_offset": np.array([0, 0, 9, 16, 16, 48], "i4")},
]


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("options", WINDOWS)
def test_windows_hide_what_they_hide_from_attention(options, page_size, implementation):
    batch = poison(decode_batch(page_size=page_size), {"num_pinned": 0} | options)
    got = mass(batch, implementation=implementation, **options)
    assert_mass(got, oracle(batch, **options))
    sees = batch.seq_lens > np.broadcast_to(options.get("slot_offset", 0), len(SEQ_LENS))
    np.testing.assert_allclose(got.sum(-1), np.where(sees, 1.0, 0.0)[:, None] * np.ones(6), 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("kind", [None, "scalar", "head", "token"])
@pytest.mark.parametrize("num_layers", [None, 2])
def test_eight_bit_pages_count_by_their_scales(kind, kv, layout, num_layers, implementation):
    batch = decode_batch(layout=layout, num_layers=num_layers)
    stored, real, scales = eight_bit(batch, kv, kind, np.random.default_rng(2))
    options = {"k_scale": scales["k_scale"]} if scales else {}
    assert_mass(mass(stored, implementation=implementation, **options), oracle(real))


def test_pages_out_of_range_leave_their_share_to_the_others(implementation):
    batch = with_holes(decode_batch(), np.random.default_rng(3))
    got = mass(batch, implementation=implementation)
    assert_mass(got, oracle(batch))
    is_hole = (batch.page_table < 0) | (batch.page_table == WILD_PAGE)
    assert is_hole.any()
    assert (got.swapaxes(1, 2)[is_hole] == 0).all()


def test_wild_lengths_are_clamped(implementation):
    batch = decode_batch()
    whole = np.resize(batch.page_table[-1], batch.page_table.shape)
    rest = {"page_table": whole, "k_pages": np.nan_to_num(batch.k_pages)}
    wild = [-(2**31), -5, 2**31 - 1, 10**6, 7, 112]
    batch = dataclasses.replace(batch, seq_lens=np.array(wild, np.int32), **rest)
    got = mass(batch, implementation=implementation)
    assert (got[:2] == 0).all()
    clamped = dataclasses.replace(batch, seq_lens=np.array([0, 0, 112, 112, 7, 112], np.int32))
    assert_mass(got, oracle(clamped))


def test_the_reference_and_the_kernels_agree_under_jit_with_all_operands_traced():
    batch = decode_batch("bfloat16", num_layers=2)
    q, k_pages, _, page_table, seq_lens = batch.operands()
    traced = {
        "layer": jnp.int32(batch.layer), "sm_scale": jnp.float32(0.3), "k_scale": None,
        "sliding_window": jnp.int32(30), "num_pinned": jnp.int32(5),
        "sinks": jnp.arange(6, dtype=jnp.bfloat16),
    }  # fmt: skip

    def of(implementation):
        return jax.jit(
            lambda *x, **options: page_attention_mass(*x, implementation=implementation, **options)
        )(q, k_pages, page_table, seq_lens, **traced)

    native, reference = of("native"), of("reference")
    np.testing.assert_allclose(native, reference, rtol=2e-5, atol=1e-7)
    eager = page_attention_mass(q, k_pages, page_table, seq_lens, **traced)
    np.testing.assert_array_equal(eager, native)
    assert (np.asarray(native).sum(-1)[1:] < 1).all(), "sinks take a part"


def test_vmap_is_one_call_after_another():
    batches = [decode_batch(seed=seed) for seed in (0, 1)]
    q, k_pages, _, page_table, seq_lens = map(
        jnp.stack, zip(*(batch.operands() for batch in batches), strict=True)
    )
    got = jax.vmap(page_attention_mass)(q, k_pages, page_table, seq_lens)
    for each, batch in zip(got, batches, strict=True):
        np.testing.assert_array_equal(each, mass(batch))


def test_a_batch_of_no_rows_or_no_pages_has_no_mass(implementation):
    q, k_pages, _, page_table, seq_lens = decode_batch().operands()
    for rows, width in ((0, 7), (6, 0)):
        operands = (q[:rows], k_pages, page_table[:rows, :width], seq_lens[:rows])
        got = page_attention_mass(*operands, implementation=implementation)
        assert got.shape == (rows, 6, width)


def test_a_derivative_is_refused_and_an_observation_is_none():
    q, k_pages, _, page_table, seq_lens = decode_batch().operands()

    def loss(q):
        return (page_attention_mass(q, k_pages, page_table, seq_lens) ** 2).sum()

    with pytest.raises(NotImplementedError, match="page_attention_mass: it has no derivative"):
        jax.grad(loss)(q)
    gradient, seen = jax.grad(lambda q: ((q**2).sum(), loss(q)), has_aux=True)(q)
    np.testing.assert_array_equal(gradient, 2 * q)
    assert seen > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((5, 6, 32), "f4")},
         "q: expected shape [num_seqs=6, num_q_heads, head_dim=32], got [5, 6, 32]"),
        ({"q": np.zeros((6, 5, 32), "f4")},
         "q: expected num_q_heads to be a multiple of num_kv_heads=2, got 5"),
        ({"q": np.zeros((6, 6, 32), "f2")},
         "k_pages: expected dtype float16 or 8-bit, got float32"),
        ({"k_pages": np.zeros((3, 16, 32), "f4")},
         "k_pages: expected rank 4, [num_pages, num_kv_heads, page_size, head_dim], or 5 with a "
         "leading num_layers, got [3, 16, 32]"),
        ({"seq_lens": np.zeros(5, "i4")},
         "page_table: expected shape [num_seqs=5, pages_per_seq], got [6, 7]"),
        ({"layout": "HDN"}, "layout: expected 'HND' or 'NHD' or 'vllm5d' or 'rpa', "
         "got 'HDN'"),
        ({"layer": 0}, "layer: expected an i32 scalar for stacked pages, None for pages without a "
         "layer axis, got a value for k_pages of rank 4"),
        ({"sm_scale": -1.0}, "sm_scale: expected a finite scale >= 0, got -1.0"),
        ({"soft_cap": 0.0}, "soft_cap: expected None or a finite number > 0, got 0.0"),
        ({"sliding_window": np.zeros(5, "i4")},
         "sliding_window: expected shape [num_seqs=6], got [5]"),
        ({"num_pinned": np.zeros(5, "i4")}, "num_pinned: expected shape [num_seqs=6], got [5]"),
        ({"sinks": np.zeros(5, "f4")}, "sinks: expected shape [num_q_heads=6], got [5]"),
        ({"implementation": "cuda"}, "implementation: expected None or 'native' or 'reference', "
         "got 'cuda'"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(changes, message):
    q, k_pages, _, page_table, seq_lens = decode_batch().operands()
    operands = {"q": q, "k_pages": k_pages, "page_table": page_table, "seq_lens": seq_lens}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        page_attention_mass(**operands | changes)
