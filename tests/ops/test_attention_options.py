# SPDX-License-Identifier: Apache-2.0
"""Windows, pinned tokens, soft caps, ALiBi, sinks, trees, rope, 8-bit K and V, all in pairs.

The first rows of a seeded table cover every pair of values of ATTENTION_FACTORS, and random rows
fill it up to 500 (deep), or 3,000 with JAX_PAGED_LONG=1; each runs against float64 softmax.
"""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits
from gradients import assert_gradients
from option_table import LONG, NUM_CASES, num_covering, table
from tiers import first_of

from jax_paged import explain, ragged_paged_attention
from jax_paged.native import load
from jax_paged.testing import (
    TOLERANCES,
    WILD_PAGE,
    Batch,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)
from jax_paged.testing.options import (
    ATTENTION_FACTORS,
    attend,
    attention_case,
    hidden_pages,
    poison,
)

pytestmark = pytest.mark.cuda
emulated_deep = pytest.mark.cuda(deep=True)
I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
REFERENCE_EVERY = 1 if LONG else 7  # it compiles and runs slowly


@pytest.mark.parametrize("implementation", ["native", "emulated"])
@pytest.mark.parametrize("index", first_of(range(NUM_CASES), num_covering()))
def test_all_pairs_of_options_match_float64_softmax(index, implementation):
    check_row(index, implementation)


@pytest.mark.parametrize("index", first_of(range(0, NUM_CASES, REFERENCE_EVERY), 6))
def test_all_pairs_of_options_match_float64_softmax_in_the_reference(index):
    check_row(index, "reference")


def check_row(index, implementation):
    """Compares the op with the oracle on one row of the table."""
    if index % 100 == 0:
        jax.clear_caches()  # a process can map only so many programs
    batch, real, options, more = attention_case(table()[index], index)
    out, lse = attend(batch, options | more, implementation=implementation)
    try:
        expected = dense_oracle(real, **options)
        assert_attention_close(
            out, lse, *expected, is_turned="rope" in options, sm_scale=real.sm_scale
        )
    except AssertionError as error:
        raise AssertionError(f"{table()[index]}: {error}") from None


def test_the_table_covers_every_pair():
    seen = [set(itertools.combinations(map(repr, row.items()), 2)) for row in table()]
    covered = set().union(*seen)
    for a, b in itertools.combinations(ATTENTION_FACTORS, 2):
        for x, y in itertools.product(ATTENTION_FACTORS[a], ATTENTION_FACTORS[b]):
            assert (repr((a, x)), repr((b, y))) in covered, (a, x, b, y)
    assert len(table()) == NUM_CASES


SMALL = Case("small", 8, 2, 64, page_size=8)


def small_batch(dtype: Any = jnp.float32, **changes) -> Batch:
    case = dataclasses.replace(SMALL, **changes)
    return make_batch(case, dtype, [1, 5, 30, 1], [90, 40, 30, 0], num_tokens=40, seed=3)


def slopes_and_sinks(num_q_heads: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {
        "alibi_slopes": np.float32(2.0 ** -np.linspace(1, 8, num_q_heads)),
        "sinks": rng.standard_normal(num_q_heads, "f4"),
    }


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["sliding_window", "soft_cap", "alibi_slopes", "sinks"])
def test_each_option_alone_matches_and_changes_the_result(name, dtype, layout, implementation):
    options = slopes_and_sinks() | {"sliding_window": 9, "soft_cap": 0.5}
    option = {name: options[name]}
    case = dataclasses.replace(SMALL, layout=layout)
    batch = make_batch(case, dtype, [1, 2, 30, 1], [90, 70, 130, 0], num_tokens=40, seed=3)
    plain, _ = attend(batch, {}, implementation=implementation)
    out, lse = attend(batch, option, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, **option))
    out, plain = (np.asarray(x[:33]).astype("f4") for x in (out, plain))
    assert np.abs(out - plain).max() > 1e-2


@pytest.mark.parametrize("window", [1, 8, 9, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_pages_left_of_the_window_may_hold_anything_or_be_gone(window, causal, implementation):
    batch = small_batch(causal=causal)
    out, lse = attend(batch, {"sliding_window": window}, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, sliding_window=window))
    gone = hidden_pages(batch, {"sliding_window": window})
    assert gone.any()
    poisoned = poison(batch, {"sliding_window": window})
    wild = dataclasses.replace(batch, page_table=np.where(gone, WILD_PAGE, batch.page_table))
    for changed in (poisoned, wild):
        got = attend(changed, {"sliding_window": window}, implementation=implementation)
        for x, y in zip(got, (out, lse), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_window_may_be_traced_and_is_off_where_it_holds_all(dtype, implementation):
    batch = small_batch(jnp.dtype(dtype))
    call = jax.jit(
        lambda window: attend(batch, {"sliding_window": window}, implementation=implementation)
    )
    plain = attend(batch, {}, implementation=implementation)
    for window in (0, -1, I32_MIN, I32_MAX, 90, 91):
        assert_same_bits(call(jnp.int32(window)), plain)
    for window in (1, 13):
        out, lse = call(jnp.int32(window))
        assert_attention_close(out, lse, *dense_oracle(batch, sliding_window=window))
    assert call._cache_size() == 1
    nothing = {"sinks": np.full(8, -np.inf, np.float32)}
    assert_same_bits(attend(batch, nothing, implementation=implementation), plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "option", [{"num_kv_splits": 1}, {"split_tokens": 16}, {"split_tokens": 64}], ids=str
)
def test_a_window_of_one_is_the_value_itself(option, dtype, implementation):
    batch = make_batch(SMALL, dtype, [1, 1, 9], [150, 9, 70], seed=1)
    out, _ = attend(batch, {"sliding_window": 1}, **option, implementation=implementation)
    positions = [(0, 149), (1, 8), *((2, 61 + i) for i in range(9))]
    for token, (row, position) in enumerate(positions):
        page, slot = divmod(position, SMALL.page_size)
        value = batch.v_pages[batch.page_table[row, page], :, slot]
        np.testing.assert_allclose(
            np.asarray(out[token]).astype("f4"), np.repeat(value, 4, axis=0).astype("f4"),
            rtol=float(jnp.finfo(out.dtype).eps),
        )  # fmt: skip


@pytest.mark.parametrize("implementation", ["native", "emulated"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "split", [{}, {"num_kv_splits": 1}, {"num_kv_splits": 4}, {"split_tokens": 64}], ids=str
)
def test_a_sink_counts_once_and_a_split_without_a_key_counts_nothing(split, dtype, implementation):
    # Queries of row 0 see one tile each, so each split is empty for one of them; row 1 misses the
    # pages of whole splits, row 2 all, and row 3 has no key.
    batch = make_batch(SMALL, dtype, [2, 1, 1, 1, 20], [65, 300, 100, 0, 40], seed=8)
    table = batch.page_table.copy()
    table[1, 8:24] = -1
    table[2] = WILD_PAGE
    batch = dataclasses.replace(batch, page_table=table)
    sinks = slopes_and_sinks()["sinks"]
    for window in (1, None):
        for options in ({"sliding_window": window, "sinks": sinks}, {"sliding_window": window}):
            out, lse = attend(batch, options, **split, implementation=implementation)
            assert_attention_close(out, lse, *dense_oracle(batch, **options))
            if "sinks" in options:
                assert not np.asarray(out[3:5]).astype("f4").any()
                np.testing.assert_array_equal(lse[3:5], [sinks, sinks])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_a_key_give_zero_and_their_sink(dtype, implementation):
    sinks = slopes_and_sinks()["sinks"]
    case = dataclasses.replace(SMALL, num_layers=2)
    batch = make_batch(case, dtype, [1, 3, 20, 2], [0, 1, 0, 12], num_tokens=30)
    nothing = dataclasses.replace(batch, page_table=np.full_like(batch.page_table, -1))
    for changed in (nothing, dataclasses.replace(batch, layer=5)):
        out, lse = attend(changed, {"sinks": sinks}, implementation=implementation)
        assert not np.asarray(out).astype("f4").any()
        np.testing.assert_array_equal(lse[:26], np.broadcast_to(sinks, (26, 8)))
        assert np.isneginf(np.asarray(lse[26:])).all(), "padding has no sink"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sink", [-200.0, 0.0, 200.0, 1000.0])
def test_a_sink_far_from_the_logits_neither_overflows_nor_is_lost(sink, dtype, implementation):
    batch = small_batch(jnp.dtype(dtype))
    options = {"sinks": np.full(8, sink, np.float32)}
    out, lse = (np.asarray(x) for x in attend(batch, options, implementation=implementation))
    expected, expected_lse = dense_oracle(batch, **options)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out.astype("f4"), expected, atol=tolerance)
    live = np.isfinite(expected_lse)
    assert np.isneginf(lse[~live]).all(), "padding has no sink"
    np.testing.assert_allclose(lse[live], expected_lse[live], rtol=1e-6, atol=1e-5)


def test_options_of_rows_with_more_queries_than_keys_and_of_wild_lengths(implementation):
    batch = make_batch(SMALL, jnp.bfloat16, [50, 3, 1], [30, 1, 21], num_tokens=60, seed=9)
    for pages in (batch.k_pages, batch.v_pages):
        pages[np.isnan(pages)] = 2
    options = slopes_and_sinks() | {"sliding_window": 5, "soft_cap": 2.0}
    for seq_lens in ([30, 1, 21], [I32_MAX, -1, 32], [I32_MIN, 33, I32_MAX]):
        wild = dataclasses.replace(batch, seq_lens=np.array(seq_lens, np.int32))
        out, lse = attend(wild, options, implementation=implementation)
        assert_attention_close(out, lse, *dense_oracle(wild, **options))


@emulated_deep
def test_slopes_and_sinks_of_other_float_dtypes_are_cast(implementation):
    batch = small_batch()
    given = {name: jnp.asarray(x, jnp.bfloat16) for name, x in slopes_and_sinks().items()}
    cast = {name: np.asarray(x.astype(jnp.float32)) for name, x in given.items()}
    out, lse = attend(batch, given, implementation=implementation)
    assert_attention_close(out, lse, *dense_oracle(batch, **cast))


def test_fixed_splits_give_a_row_the_same_bits_in_any_batch():
    batch = make_batch(SMALL, jnp.float32, [1, 1, 1], [300, 77, 500], seed=6)
    options = slopes_and_sinks() | {"sliding_window": 100, "soft_cap": 5.0}
    together, _ = attend(batch, options, split_tokens=32, implementation="native")
    for row in range(3):
        out, _ = attend(batch.alone(row), options, split_tokens=32, implementation="native")
        np.testing.assert_array_equal(out[0], together[row])


@emulated_deep
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_match_float64_finite_differences(causal, implementation):
    case = Case("small", 4, 2, 16, page_size=4, num_layers=2, causal=causal)
    batch = make_batch(case, jnp.float32, [1, 6, 2], [9, 13, 0], num_tokens=10, seed=1)
    rng = np.random.default_rng(0)
    fixed = {"sliding_window": 5, "soft_cap": 2.0}
    weight = rng.standard_normal((10, 4, 16), "f4")
    arguments, options = batch.ragged()
    operands = (*arguments[:3], jnp.float32(0.7))
    operands += tuple(jnp.asarray(x) for x in slopes_and_sinks(4).values())
    live = np.s_[:9]

    def loss(q, k_pages, v_pages, sm_scale, slopes, sinks):
        given = options | {"sm_scale": sm_scale, "alibi_slopes": slopes, "sinks": sinks} | fixed
        out, lse = ragged_paged_attention(
            q, k_pages, v_pages, *arguments[3:], **given, return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out * weight) + jnp.sum(jnp.sin(lse[live]))

    def exact_loss(q, k_pages, v_pages, sm_scale, slopes, sinks):
        changed = dataclasses.replace(
            batch, q=q, k_pages=k_pages, v_pages=v_pages, sm_scale=float(sm_scale)
        )
        out, lse = dense_oracle(changed, alibi_slopes=slopes, sinks=sinks, **fixed)
        return np.sum(out * weight) + np.sum(np.sin(lse[live]))

    gradients = jax.grad(loss, argnums=tuple(range(6)))(*operands)
    assert_gradients(gradients, exact_loss, operands, rng, rtol=3e-4)


@emulated_deep
def test_vmap_over_options_equals_the_loop(implementation):
    batch = small_batch()
    windows = jnp.array([3, 0, 40], jnp.int32)
    sinks = jnp.asarray(np.stack([slopes_and_sinks()["sinks"] * f for f in (1, -1, 3)]))

    def call(window, sinks):
        options = {"sliding_window": window, "sinks": sinks}
        return attend(batch, options, implementation=implementation)[0]

    batched = jax.vmap(call)(windows, sinks)
    for i in range(3):
        np.testing.assert_allclose(batched[i], call(windows[i], sinks[i]), rtol=1e-6, atol=1e-6)


WRONG = [
    ({"sliding_window": 2.5}, "sliding_window: expected an integer dtype, got dtype"),
    (
        {"sliding_window": np.zeros(5, np.int32)},
        "sliding_window: expected shape [num_seqs=4], got [5]",
    ),
    ({"num_pinned": np.zeros(5, np.int32)}, "num_pinned: expected shape [num_seqs=4], got [5]"),
    ({"slot_offset": 0.5}, "slot_offset: expected an integer dtype, got dtype"),
    ({"soft_cap": 0.0}, "soft_cap: expected None or a finite number > 0, got 0.0"),
    ({"soft_cap": -30.0}, "soft_cap: expected None or a finite number > 0, got -30.0"),
    ({"soft_cap": float("inf")}, "soft_cap: expected None or a finite number > 0, got inf"),
    ({"soft_cap": "30"}, "soft_cap: expected None or a finite number > 0, got 30"),
    ({"alibi_slopes": np.zeros(4, np.float32)}, "alibi_slopes: expected shape [num_q_heads=8]"),
    ({"alibi_slopes": np.zeros(8, np.int32)}, "alibi_slopes: expected dtype bfloat16 or float16"),
    ({"sinks": np.zeros((8, 1), np.float32)}, "sinks: expected shape [num_q_heads=8], got [8, 1]"),
    ({"sinks": np.zeros(8, np.int32)}, "sinks: expected dtype bfloat16 or float16 or float32"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[w[1][:50] for w in WRONG])
def test_a_wrong_option_is_told_in_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attend(small_batch(), options)


@pytest.mark.parametrize("window", [3, 0, -1, None])
def test_cuda_takes_every_option_at_lowering_and_explain_says_so(window, monkeypatch):
    options = slopes_and_sinks() | {"sliding_window": window, "soft_cap": 2.0}
    arguments, defaults = small_batch().ragged()
    jax.clear_caches()
    monkeypatch.setattr(load, "targets", lambda _: ("jax_paged.attention.v1",))  # as if built
    traced = jax.jit(lambda: attend(small_batch(), options)[0]).trace()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in text.splitlines() if "@jax_paged.attention.v1" in line)
    assert "soft_cap = 2.0" in call
    given = set(re.findall(r'operands = "([^"]*)"', call)[0].split(","))
    pages = {"q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens", "num_seqs", "layer"}
    seen = {"alibi_slopes", "sinks", "sm_scale"} | ({"sliding_window"} if window == 3 else set())
    assert given == pages | seen
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = explain("ragged_paged_attention", *arguments, **defaults, **options)
    assert (plan["platform"], plan["implementation"]) == ("gpu", "native")
    monkeypatch.undo()
    jax.clear_caches()


def test_explain_counts_what_a_window_leaves():
    batch = make_batch(SMALL, jnp.float32, [1, 200], [4000, 4000])
    arguments, options = batch.ragged()
    plan = functools.partial(explain, "ragged_paged_attention", *arguments, **options)
    assert plan(split_tokens=100)["kv_splits"] == [40, 40]
    assert plan(split_tokens=100, sliding_window=350)["kv_splits"][0] == 4
    assert plan(split_tokens=100, sliding_window=jnp.int32(350))["kv_splits"][0] == 4
    assert 4 <= plan(split_tokens=100, sliding_window=350)["kv_splits"][1] <= 7
    assert plan(split_tokens=100, sliding_window=-1)["kv_splits"] == [40, 40]
    decode = make_batch(SMALL, jnp.float32, [1, 1], [4000, 4000]).operands()
    whole, cut = (explain("paged_attention", *decode, sliding_window=w) for w in (None, 8))
    assert (whole["num_threads"] > 1) == (whole["work_items"] > cut["work_items"])
    assert cut["work_items"] == 4, "two rows of two KV heads, not split"
    assert plan(**slopes_and_sinks(), soft_cap=np.float32(3))["implementation"] == "native"


@emulated_deep
@pytest.mark.parametrize("sizes", list(itertools.product([1, 4, 8], [1, 3, 4, 6])), ids=str)
def test_few_queries_in_small_windows(sizes, implementation):
    """A window may begin behind the last key of another query; masks cross tiles of rows."""
    group, q_len = sizes
    case = Case("windows", 2 * group, 2, 64, page_size=16)
    batch = make_batch(case, "float32", [q_len] * 3, [q_len, 67, 300], seed=q_len)
    arguments, defaults = batch.ragged()
    for window, soft_cap in [(1, None), (2, 5.0), (3, None), (70, 5.0)]:
        options = {"sliding_window": window, "soft_cap": soft_cap}
        out, lse = ragged_paged_attention(
            *arguments, **defaults, **options, return_lse=True, implementation=implementation
        )
        assert_attention_close(out, lse, *dense_oracle(batch, **options))


# Row 2181 of the long table: ALiBi alone makes its logits (sm_scale is 0), which are up to 502.
FAR_KEYS: dict[str, Any] = {
    "sliding_window": None, "pinned": "slid", "rope": None, "tree": False, "soft_cap": 30.0,
    "alibi": True, "sinks": None, "causal": False, "dtype": "float32", "kv": "int8",
    "scale": "head", "layout": "HND", "page_size": 32, "group": 8, "head_dim": (128, 72),
    "split": (), "rows": "mixed", "sm_scale": 0.0, "stacked": True, "holes": False,
}  # fmt: skip
ERROR_OF = """
import numpy as np
from jax_paged import build_info
from jax_paged.testing import dense_oracle
from jax_paged.testing.options import attend, attention_case
batch, real, options, more = attention_case({row}, 2181)
out, _ = attend(batch, options | more, implementation="native")
expected, lse = dense_oracle(real, **options)
norm = np.linalg.norm(expected, axis=-1)
error = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=-1)[norm > 0] / norm[norm > 0]
print(build_info()["cpu"]["isa"], lse.max(), error.max())
"""


def test_generic_kernels_round_a_large_logit_once():
    """The rounding of the logit itself is 9e-6 here. Another one of its size would double that."""
    child = subprocess.run(
        [sys.executable, "-P", "-c", ERROR_OF.format(row=FAR_KEYS)],
        env=os.environ | {"JAX_PAGED_CPU_ISA": "generic"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    isa, lse, error = child.stdout.split()
    assert isa == "generic"
    assert float(lse) > 500
    assert float(error) < 1e-5
