# SPDX-License-Identifier: Apache-2.0
"""Rope inside attention: the same as rope before the pages are written, by any positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_batches import CASE, batch_of, tables

from jax_paged import paged_attention, ragged_paged_attention
from jax_paged.ops.rope import apply_rope
from jax_paged.testing import assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import attend

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("style", "rotary_dim"), [("half", 64), ("interleaved", 64), ("half", 20)])
def test_it_equals_rope_before_the_write(style, rotary_dim, implementation):
    batch = batch_of()
    rope = tables(200, rotary_dim, style)
    k_pages, q = batch.k_pages.copy(), batch.q.copy()
    for row, (length, begin, end) in enumerate([(130, 0, 1), (60, 1, 21), (3, 21, 24)]):
        place = np.arange(length)
        page, slot = batch.page_table[row, place // 16], place % 16
        turned = apply_rope(
            jnp.asarray(k_pages[page, :, slot]), rope.cos[:length], rope.sin[:length], style=style
        )
        k_pages[page, :, slot] = turned
        at = np.arange(length - (end - begin), length)
        q[begin:end] = apply_rope(jnp.asarray(q[begin:end]), rope.cos[at], rope.sin[at],
                                  style=style)  # fmt: skip
    expected = dense_oracle(dataclasses.replace(batch, q=q, k_pages=k_pages))
    got = attend(batch, {"rope": rope}, implementation=implementation)
    assert_attention_close(*got, *expected, logit_size=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["HND", "NHD", "vllm5d"])
def test_16_bit_pages_of_every_layout_are_turned_and_rounded(dtype, layout, implementation):
    batch = batch_of(dtype, layout=layout)
    rope = tables(200)
    got = attend(batch, {"rope": rope}, implementation=implementation)
    assert_attention_close(*got, *dense_oracle(batch, rope=rope), is_turned=True)


SIZES = [(64, 6, "interleaved"), (64, 20, "half"), (80, 80, "half"), (128, 64, "interleaved")]
SIZES += [(128, 128, "half"), (256, 256, "half")]


@pytest.mark.parametrize(("head_dim", "rotary_dim", "style"), SIZES)
@pytest.mark.parametrize("option", ["tree", "pins", "plain"])
def test_sizes_trees_and_pins_go_together(head_dim, rotary_dim, style, option, implementation):
    """Three pairs, partial rotary, heads wider than the registers; tables that end in the row."""
    batch = batch_of("bfloat16", head_dim=head_dim)
    options: dict[str, Any] = {
        "tree": {
            "tree": np.int32([[[0, 1]] * 3, [[0, 3], [1, 2], [2, 3]], [[0, 1]] * 3]),
            "tree_sizes": np.int32([1, 3, 0]),
        },
        "pins": {
            "sliding_window": 30, "num_pinned": np.int32([4, 20, 0]),
            "slot_offset": np.int32([0, 16, 0]),
        },
        "plain": {},
    }[option]  # fmt: skip
    if option == "pins":
        batch = dataclasses.replace(batch, seq_lens=batch.seq_lens + options["slot_offset"])
    options["rope"] = tables(128, rotary_dim, style)
    got = attend(batch, options, implementation=implementation)
    assert_attention_close(*got, *dense_oracle(batch, **options), is_turned=True)


@pytest.mark.parametrize("causal", [True, False])
def test_positions_beyond_the_tables_are_masked(causal, implementation):
    batch, rope = batch_of(causal=causal), tables(50)
    out, lse = attend(batch, {"rope": rope}, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, rope=rope), logit_size=2)
    assert not np.asarray(out)[0].any()
    assert np.isneginf(np.asarray(lse)[0]).all()
    assert np.asarray(out)[1:5].any(-1).all(), "queries at positions 40 and on, within the tables"


@pytest.mark.parametrize("out_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("causal", [True, False])
def test_nan_beyond_the_tables_reaches_no_output(causal, dtype, out_dtype, implementation):
    """Neither those of queries within the tables nor those beyond, which are 0."""
    eight_bit = dtype == "int8"
    batch = batch_of("float32" if eight_bit else dtype, causal=causal)
    rope, beyond = tables(50), np.arange(50, 130)
    options: dict[str, Any] = {"rope": rope}
    scales = [np.full(batch.k_pages.shape[:3], 0.02, np.float32) for _ in "kv"]
    if eight_bit:
        codes = (np.int8(np.rint(np.nan_to_num(x) / 0.02)) for x in (batch.k_pages, batch.v_pages))
        k_pages, v_pages = codes
        batch = dataclasses.replace(batch, k_pages=k_pages, v_pages=v_pages)
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    if out_dtype:
        options |= {"out_dtype": jnp.dtype(out_dtype)}
    expected = [np.asarray(x) for x in attend(batch, options, implementation=implementation)]
    for row, length in ((0, 130), (1, 60)):
        at = beyond[beyond < length]
        for x in scales if eight_bit else (batch.k_pages, batch.v_pages):
            x[batch.page_table[row, at // 16], :, at % 16] = np.nan
    out, lse = attend(batch, options, implementation=implementation)
    assert not np.float32(out)[[0, *range(11, 21)]].any(), "queries at positions 129 and 50 to 59"
    np.testing.assert_array_equal(np.float32(out), np.float32(expected[0]))
    np.testing.assert_array_equal(lse, expected[1])


def test_a_query_that_sees_nothing_is_0_beside_one_that_sees_nan(implementation):
    """In the reference they share K and V."""
    pages = jnp.ones((1, 1, 4, 8), jnp.float32).at[0, 0, 0].set(jnp.nan)
    arguments = pages, pages, jnp.array([[0]]), jnp.array([1]), jnp.array([0, 2])
    out, lse = ragged_paged_attention(
        jnp.ones((2, 1, 8), jnp.float32), *arguments, implementation=implementation,
        return_lse=True,
    )  # fmt: skip
    assert not np.asarray(out[0]).any(), "at position -1"
    assert np.isneginf(lse[0]).all()
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()


def test_pages_that_slid_stand_where_they_are_said_to_stand(implementation):
    """As in a window that is placed anew at each step (StreamingLLM), and as in one that is not."""
    batch, rope = batch_of(), tables(1200)
    options = {"sliding_window": 60, "num_pinned": np.int32([4, 4, 0]), "rope": rope}
    for offset in (np.int32([0, 0, 0]), np.int32([1024, 16, 0])):
        given = options | {"slot_offset": offset}
        moved = dataclasses.replace(batch, seq_lens=batch.seq_lens + offset)
        got = attend(moved, given, implementation=implementation)
        assert_attention_close(*got, *dense_oracle(moved, **given), logit_size=2)


def test_decode_takes_rope_and_so_does_its_gradient():
    batch = make_batch(CASE, jnp.dtype("float32"), [1, 1], [20, 33], seed=4)
    q, *rest = batch.operands()
    rope = tables(40)

    def loss(q, implementation):
        out = paged_attention(q, *rest, rope=rope, implementation=implementation)
        return jnp.sum(out * out)

    got, expected = (jax.grad(loss)(q, x) for x in ("native", "reference"))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


WRONG = [
    ([0.0] * 3, "rope: expected (cos, sin) or (cos, sin, style), got a list"),
    ((np.zeros((4, 8)), np.zeros((4, 8))), "rope cos: expected dtype float32, got float64"),
    ((np.float32(np.zeros((4, 8))), np.float32(np.zeros((4, 7)))), "rope sin: expected shape"),
    ((np.float32(np.zeros((4, 33))),) * 2, "rope cos: expected max_positions >= 1 and rotary_dim"),
    ((np.float32(np.zeros((4, 8))),) * 2 + ("neox",), "rope style: expected 'half' or"),
]


@pytest.mark.parametrize(("rope", "message"), WRONG, ids=[w[1][:40] for w in WRONG])
def test_wrong_tables_are_told_in_one_line(rope, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        attend(batch_of(), {"rope": rope}, implementation="native")
