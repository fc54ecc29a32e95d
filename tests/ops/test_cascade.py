# SPDX-License-Identifier: Apache-2.0
"""cascade_attention: shared parts of a history, read once, give plain attention over all of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged import (
    CascadeLevel,
    KVState,
    StepBatch,
    cascade_attention,
    cascade_levels,
    explain,
    mla_cascade_attention,
    paged_attention,
    ragged_paged_attention,
)
from jax_paged.testing import TOLERANCES, assert_attention_close, dense_oracle, make_batch, mla
from jax_paged.testing.cascade import CASE, share
from jax_paged.testing.options import random_parents, trees_of

PAGE = CASE.page_size
# Which page each row has at each place: rows with the same letter there share it.
SHARING = {
    "all": ["aaaab", "aaaac", "aaaad", "aaaae"],
    "none": ["aaaa", "bbbb", "c", "dd"],
    "two groups, interleaved": ["aaab", "ccd", "aaae", "ccf", "aaag"],
    "nested": ["aabbc", "aabbd", "aae", "aaf", "g"],
    "all pages": ["aaa", "aaa", "aaa"],
    "one row": ["aaa"],
    "later pages only": ["abc", "dbc", "ebc"],  # no common prefix: nothing is shared
    "shorter inside longer": ["aaaaaa", "aa", "aaa", "a"],
}


def derive(batch, **options):
    arguments = (batch.page_table, batch.seq_lens, batch.cu_q_lens, batch.num_seqs)
    return cascade_levels(*map(jnp.asarray, arguments), page_size=PAGE, **options)


def attend(batch, levels, **options):
    q, k_pages, v_pages, *_ = batch.operands()
    return cascade_attention(
        q, k_pages, v_pages, levels, jnp.asarray(batch.cu_q_lens), batch.num_seqs,
        return_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("pattern", SHARING.values(), ids=SHARING)
def test_derived_levels_give_plain_attention(pattern, implementation):
    batch = share(pattern)
    num_levels = 3 if pattern is SHARING["nested"] else 2
    result = attend(batch, derive(batch, num_levels=num_levels), implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(2))
def test_random_sharing_in_all_dtypes(seed, dtype, implementation):
    rng = np.random.default_rng(seed)
    pattern = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(9)]
    q_lens = list(rng.integers(0, 4, 9))
    batch = share(pattern, last=4, q_lens=q_lens, dtype=dtype, seed=seed)
    num_levels = 2 + seed % 3
    levels = derive(batch, num_levels=num_levels)
    result = attend(batch, levels, implementation=implementation, soft_cap=3.0)
    # Each level's result is rounded, and each merged one.
    assert_attention_close(*result, *dense_oracle(batch, soft_cap=3.0), roundings=num_levels)


def test_pages_of_the_step_itself_are_never_shared():
    # Row 0 has queries on its first page, row 1 beyond it: sharing it would show row 0 its future.
    batch = share(["a", "ab"], q_lens=[2, 1])
    levels = derive(batch)
    np.testing.assert_array_equal(levels[0].row_groups, [-1, -1])
    chunk = share(["aab", "aac"], q_lens=[9, 1], last=3)  # row 0: 6 tokens of page 1 are new
    levels = derive(chunk)
    np.testing.assert_array_equal(levels[0].seq_lens, [PAGE])
    assert_attention_close(*attend(chunk, levels), *dense_oracle(chunk))


def test_sharing_is_found_where_it_is():
    batch = share(SHARING["two groups, interleaved"])
    prefix, own = derive(batch)
    np.testing.assert_array_equal(prefix.row_groups, [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(prefix.seq_lens, [3 * PAGE, 2 * PAGE])
    np.testing.assert_array_equal(own.seq_lens, [3] * 5)
    assert own.row_groups is None
    nested = derive(share(SHARING["nested"]), num_levels=3)
    np.testing.assert_array_equal(nested[0].seq_lens, [2 * PAGE, 0])
    np.testing.assert_array_equal(nested[1].seq_lens, [2 * PAGE, 0])
    np.testing.assert_array_equal(nested[1].row_groups, [0, 0, -1, -1, -1])


def test_groups_beyond_max_groups_keep_their_pages_and_dead_rows_share_nothing():
    batch = share(SHARING["two groups, interleaved"])
    levels = derive(batch, max_groups=1)
    np.testing.assert_array_equal(levels[0].row_groups, [0, -1, 0, -1, 0])
    assert_attention_close(*attend(batch, levels), *dense_oracle(batch))
    assert len(derive(batch, max_groups=0)) == 1
    batch = dataclasses.replace(batch, num_seqs=3)
    levels = derive(batch)
    np.testing.assert_array_equal(levels[0].row_groups, [0, -1, 0, -1, -1])
    assert_attention_close(*attend(batch, levels), *dense_oracle(batch))


def test_levels_by_hand_with_sinks_in_one_part(implementation):
    batch = share(SHARING["nested"])
    sinks = jnp.linspace(-1, 3, 6, dtype=jnp.float32)
    rows = batch.page_table
    outer = (rows[:1, :2], np.array([2 * PAGE]), np.array([0, 0, 0, 0, -1]))
    inner = CascadeLevel(rows[:1, 2:4], np.array([2 * PAGE]), np.array([0, 0, 7, -1, -9]))
    rest = np.full_like(rows, -1)
    for row, shared in enumerate([4, 4, 2, 2, 0]):
        rest[row, : rows.shape[1] - shared] = rows[row, shared:]
    lengths = batch.seq_lens - PAGE * np.array([4, 4, 2, 2, 0])
    levels = [outer, inner, CascadeLevel(rest, lengths)]
    result = attend(batch, levels, sinks=sinks, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch, sinks=np.asarray(sinks)))


@pytest.mark.parametrize("pattern", SHARING.values(), ids=SHARING)
def test_alibi_goes_by_the_distances_in_whole_rows(pattern, implementation):
    slopes = np.float32([0.5, 0.25, 0.05, -0.05, 0.01, 0.0])
    batch = share(pattern, q_lens=[1, 3, 2, 1, 2][: len(pattern)])
    options = {"alibi_slopes": slopes, "soft_cap": 5.0, "sinks": np.float32([1, 0, -1, 2, 3, 0])}
    num_levels = 3 if pattern is SHARING["nested"] else 2
    levels = derive(batch, num_levels=num_levels)
    arrays = {k: jnp.asarray(x) if k != "soft_cap" else x for k, x in options.items()}
    result = attend(batch, levels, implementation=implementation, **arrays)
    assert_attention_close(*result, *dense_oracle(batch, **options))


def test_alibi_with_more_queries_than_shared_tokens(implementation):
    """The call of the prefix has most of its queries before its first token."""
    batch = share(["ab", "ac", "ad", "e"], q_lens=[9, 3, 10, 2], last=12)
    levels = derive(batch)
    np.testing.assert_array_equal(levels[0].seq_lens[:1], [PAGE])
    slopes = np.float32([0.5, 0.25, 0.05, -0.05, 0.01, 0.0])
    options = {"alibi_slopes": jnp.asarray(slopes), "implementation": implementation}
    result = attend(batch, levels, **options)
    assert_attention_close(*result, *dense_oracle(batch, alibi_slopes=slopes))


def test_one_query_per_row_without_cu_q_lens(implementation):
    batch = share(SHARING["all"])
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    levels = cascade_levels(table, seq_lens, page_size=PAGE)
    options = {"alibi_slopes": jnp.linspace(0, 0.5, 6, dtype=jnp.float32), "return_lse": True}
    plain = paged_attention(q[:4], k_pages, v_pages, table, seq_lens, **options)
    mine = cascade_attention(
        q[:4], k_pages, v_pages, levels, implementation=implementation, **options
    )
    assert_attention_close(*mine, *(np.asarray(x, "f8") for x in plain))


def test_layers_and_layouts():
    for layout in ("NHD", "vllm5d"):
        case = dataclasses.replace(CASE, layout=layout, num_layers=2)
        batch = make_batch(case, jnp.dtype("f4"), [1, 1, 3], [29, 40, 33], shared_pages=True)
        levels = derive(batch)
        np.testing.assert_array_equal(levels[0].seq_lens[:1], [3 * PAGE])
        result = attend(batch, levels, layer=batch.layer, layout=layout)
        assert_attention_close(*result, *dense_oracle(batch))


@pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="which kernels serve f32 on a CPU; CUDA has another"
)
def test_the_prefix_is_one_row_of_work_for_the_whole_group():
    pattern = ["a" * 40 + letter for letter in "bcdefghi"]
    batch = share(pattern)
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    levels = cascade_levels(table, seq_lens, page_size=PAGE)
    plan = explain("cascade_attention", q[:8], k_pages, v_pages, levels, num_kv_splits=1)
    prefix, own = plan["levels"]
    # Eight rows x three heads of a group are one block of packed rows: one unit per KV head.
    assert prefix["kernels"] == ["prefill", "empty", "empty", "empty"]
    assert prefix["work_items"] == CASE.num_kv_heads
    assert own["kernels"] == ["decode"] * 8
    plain = explain("paged_attention", q[:8], k_pages, v_pages, table, seq_lens, num_kv_splits=1)
    assert plain["work_items"] == 8 * CASE.num_kv_heads


def test_gradients_are_those_of_plain_attention():
    batch = share(["ab", "ac", "d"])
    levels, arrays = derive(batch), batch.operands()[:3]
    q_live = jnp.where(jnp.isnan(arrays[0]), jnp.float32(0), arrays[0])
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(q_live.shape), jnp.float32)
    sinks, slopes = jnp.ones(6, jnp.float32), jnp.linspace(0, 0.5, 6, dtype=jnp.float32)
    bounds = jnp.asarray(batch.cu_q_lens), jnp.int32(batch.num_seqs)

    def cascade(q, k_pages, v_pages, sinks, slopes):
        options = {"sinks": sinks, "alibi_slopes": slopes}
        return jnp.sum(weight * cascade_attention(q, k_pages, v_pages, levels, *bounds, **options))

    def plain(q, k_pages, v_pages, sinks, slopes):
        rows = (jnp.asarray(batch.page_table), jnp.asarray(batch.seq_lens), *bounds)
        options = {"sinks": sinks, "alibi_slopes": slopes}
        return jnp.sum(weight * ragged_paged_attention(q, k_pages, v_pages, *rows, **options))

    arguments = (q_live, *arrays[1:], sinks, slopes)
    mine = jax.jit(jax.grad(cascade, (0, 1, 2, 3, 4)))(*arguments)
    expected = jax.jit(jax.grad(plain, (0, 1, 2, 3, 4)))(*arguments)
    for a, b in zip(mine, expected, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "shares"),
    [({"min_rows": 4}, True), ({"min_rows": 5}, False), ({"min_tokens": 16}, True),
     ({"min_tokens": 17}, False), ({"min_saved": 48}, True), ({"min_saved": 49}, False)],
)  # fmt: skip
def test_rows_that_share_less_than_asked_keep_their_pages(options, shares):
    table = np.array([[7, 8, 1], [7, 8, 2], [5, 4, 3], [7, 8, 6], [7, 8, 9]], np.int32)
    level, own = cascade_levels(table, np.full(5, 3 * PAGE), page_size=PAGE, **options)
    assert np.asarray(level.row_groups).tolist() == ([0, 0, -1, 0, 0] if shares else [-1] * 5)
    assert np.asarray(own.seq_lens).tolist() == ([8, 8, 24, 8, 8] if shares else [24] * 5)


def test_a_forked_state_gives_levels_under_jit():
    kv = KVState.create(num_layers=1, num_pages=16, page_size=PAGE, num_kv_heads=2, head_dim=32,
                        max_seqs=3, pages_per_seq=5, dtype=jnp.float32)  # fmt: skip

    @jax.jit
    def step(kv):
        kv, _ = kv.reserve(jnp.array([0]), 2 * PAGE)
        kv, _, _ = kv.step(jnp.array([0]), 2 * PAGE, num_tokens=2 * PAGE)
        children = jnp.array([1, 2])
        kv, _ = kv.fork(jnp.array([0, 0]), children, jnp.array([2 * PAGE, 2 * PAGE]))
        rows = jnp.arange(3)
        kv, _ = kv.reserve(rows, 1)
        kv, batch, status = kv.step(rows, 1)
        return cascade_levels(batch, page_size=PAGE), status

    (prefix, own), status = step(kv)
    np.testing.assert_array_equal(status, 0)
    np.testing.assert_array_equal(prefix.row_groups[:3], 0)
    np.testing.assert_array_equal(prefix.seq_lens[:1], [2 * PAGE])
    np.testing.assert_array_equal(own.seq_lens[:3], 1)


def hostile(seed, kind):
    """A batch of rows that share pages, with windows, pins and trees: (batch, of the rows)."""
    rng = np.random.default_rng([seed, 9])
    rows = 9
    pattern = ["".join(rng.choice(list("aaab"), rng.integers(3, 9))) for _ in range(rows)]
    lengths = [(len(pages) - 1) * PAGE + 3 for pages in pattern]
    q_lens = [int(min(n, rng.integers(0, 5))) for n in lengths]
    batch = share(pattern, q_lens=q_lens, seed=seed)
    of_rows = {}
    if "window" in kind:
        of_rows["sliding_window"] = rng.choice([0, 5, PAGE, 2 * PAGE + 1, 500], rows).astype("i4")
    if "pins" in kind:
        of_rows["num_pinned"] = rng.choice([0, 3, PAGE, 2 * PAGE + 5], rows).astype("i4")
        slid = (of_rows["sliding_window"] > 0) & (of_rows["sliding_window"] < 500)
        of_rows["slot_offset"] = (rng.integers(0, 4, rows) * PAGE * slid).astype("i4")
        lengths = batch.seq_lens + of_rows["slot_offset"]
        batch = dataclasses.replace(batch, seq_lens=lengths)
    if "tree" in kind:
        sizes = [0 if rng.random() < 0.3 else int(max(q, 1) + 2) for q in q_lens]
        of_rows |= trees_of([random_parents(rng, size, "forest") for size in sizes])
    return batch, of_rows


KINDS = ["window", "window, pins", "tree", "window, pins, tree"]


@pytest.mark.parametrize("seed", first_of(range(12), 3))
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_pins_and_trees(kind, alibi, seed, implementation):
    batch, of_rows = hostile(seed, kind)
    options = {"alibi_slopes": np.linspace(0.01, 0.2, 6, dtype="f4")} if alibi else {}
    levels = derive(batch, num_levels=2 + seed % 2, **of_rows)
    result = attend(batch, levels, **options, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch, **of_rows, **options), roundings=3)


def test_alibi_of_queries_that_are_pinned_themselves(implementation):
    """Such a query stands where its slot says, whatever slid after it."""
    batch = share(["ab", "ac", "ad"], q_lens=[2, 3, 4])
    offset, slopes = np.int32([PAGE, 0, 2 * PAGE]), np.linspace(0.01, 0.2, 6, dtype="f4")
    batch = dataclasses.replace(batch, seq_lens=batch.seq_lens + offset)
    pinned = np.int32([21, 21, 9])  # of 11 tokens; the queries of the last row begin at 7
    of_rows = {"sliding_window": np.int32(30), "num_pinned": pinned, "slot_offset": offset}
    levels = derive(batch, **of_rows)
    np.testing.assert_array_equal(levels[0].row_groups, [0, 0, -1])
    slopes = jnp.asarray(slopes)
    result = attend(batch, levels, alibi_slopes=slopes, implementation=implementation)
    assert_attention_close(*result, *dense_oracle(batch, alibi_slopes=slopes, **of_rows))


@pytest.mark.parametrize("kind", ["tree", "window, pins"])
def test_some_rows_of_these_share(kind):
    found = [derive(hostile(seed, kind)[0], **hostile(seed, kind)[1])[0] for seed in range(6)]
    assert max(int(level.seq_lens.max()) for level in found) >= 2 * PAGE


def test_a_row_within_its_window_shares_all_and_one_beyond_it_its_pinned_pages():
    batch = share(["aaab", "aaac", "aaad"])
    pinned = np.array([PAGE + 1, PAGE, 0])
    for window, want in ((100, 3 * PAGE), (2 * PAGE, PAGE)):
        levels = derive(batch, sliding_window=window, num_pinned=pinned, slot_offset=0 * pinned)
        assert levels[0].seq_lens[0] == want
    np.testing.assert_array_equal(levels[0].row_groups, [0, 0, -1])
    np.testing.assert_array_equal(levels[1].num_pinned, [1, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_tells_windows_and_trees(kind):
    """As a state's `step` gives them, under jit."""
    batch, of_rows = hostile(1, kind)
    step = StepBatch(
        *map(jnp.asarray, (batch.page_table, batch.seq_lens, batch.cu_q_lens)),
        jnp.asarray(batch.num_seqs)[None], *[jnp.zeros(len(batch.q), jnp.int32)] * 2, **of_rows,
    )  # fmt: skip
    got = jax.jit(functools.partial(cascade_levels, page_size=PAGE))(step)
    for mine, theirs in zip(got, derive(batch, **of_rows), strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    with pytest.raises(ValueError, match="page_table: expected a StepBatch alone, got more beside"):
        cascade_levels(step, step.seq_lens, page_size=PAGE)
    name = next(iter(of_rows))
    with pytest.raises(ValueError, match=f"{name}: expected None beside a StepBatch that knows it"):
        cascade_levels(step, page_size=PAGE, **{name: of_rows[name]})


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_latent_rows(kind, kv_dtype, implementation):
    batch, of_rows = hostile(2, kind)
    case = dataclasses.replace(batch.case, num_kv_heads=1, num_q_heads=5)
    batch = dataclasses.replace(
        batch, case=case, q=batch.q[:, :5], k_pages=batch.k_pages[:, :1],
        v_pages=batch.k_pages[:, :1, :, :24], sm_scale=0.2,
    )  # fmt: skip
    options, real = {}, batch
    if kv_dtype is not None:
        options["kv_scale"] = np.float32(0.03)
        batch, real = mla.eight_bit(batch, kv_dtype, options["kv_scale"])
    (q, k_pages, *_), _ = batch.ragged()
    result = mla_cascade_attention(
        q, jnp.squeeze(k_pages, -3), derive(batch, **of_rows), jnp.asarray(batch.cu_q_lens),
        batch.num_seqs, sm_scale=0.2, v_head_dim=24, return_lse=True, **options,
        implementation=implementation,
    )  # fmt: skip
    assert_attention_close(*result, *dense_oracle(real, **of_rows), roundings=2)


@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_output(out_dtype, implementation):
    batch = share(SHARING["nested"])
    levels, scale = derive(batch, num_levels=3), np.float32(0.01)
    whole, want_lse = attend(batch, levels, implementation=implementation)
    options = {"out_dtype": out_dtype, "out_scale": scale, "implementation": implementation}
    out, lse = attend(batch, levels, **options)
    np.testing.assert_array_equal(lse, want_lse)
    info = jnp.finfo(out_dtype)
    want = np.clip(np.asarray(whole, "f8") / scale, -float(info.max), float(info.max))
    # Half a step, and what XLA of jax 0.7 loses by rounding to f16 first.
    half = float(info.eps) / 2 * (1 + 2**-7)
    least = float(info.smallest_subnormal) / 2
    np.testing.assert_allclose(np.float64(out), want, rtol=half, atol=least)
    with pytest.raises(ValueError, match="out_scale: expected None without an out_dtype"):
        attend(batch, levels, out_scale=scale)
    with pytest.raises(ValueError, match="out_dtype: expected "):
        attend(batch, levels, out_dtype="int8")


@pytest.mark.parametrize(
    ("levels", "options", "text"),
    [
        ([], {}, "levels: expected at least one level, got 0"),
        ([([[0]], [1, 2])], {}, r"levels\[0\].seq_lens: expected shape \[groups=1\], got \[2\]"),
        ([([[0]], [1])], {}, r"levels\[0\]: expected the batch's 2 rows without row_groups, got 1"),
        ([([[0]], [1], [0])], {}, r"levels\[0\].row_groups: expected shape \[num_seqs=2\], got"),
        (
            [([[0]], [1], [0, 0], 5)],
            {},
            r"levels\[0\].sliding_window: expected None with row_groups, got a value",
        ),
        (
            [([[0]], [1], [0, 0])],
            {"sinks": jnp.ones(6, jnp.float32)},
            "sinks: expected a level without row_gr",
        ),
        (
            [([[0]], [1], [0, 0])],
            {"alibi_slopes": jnp.ones(6, jnp.float32)},
            "alibi_slopes: expected a last level without row_groups, .* got one with them",
        ),
        (
            [([[0]], [1], [0, 0]), ([[1], [2]], [1, 1])],
            {"alibi_slopes": jnp.ones(3, jnp.float32)},
            r"alibi_slopes: expected shape \[num_q_heads=6\], got \[3\]",
        ),
    ],
)
def test_wrong_levels_are_named(levels, options, text):
    pages = jnp.zeros((3, 2, PAGE, 32), jnp.float32)
    levels = [tuple(map(np.array, level)) for level in levels]
    with pytest.raises(ValueError, match=text):
        cascade_attention(jnp.zeros((2, 6, 32), jnp.float32), pages, pages, levels, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_size": 0}, "page_size: expected an int >= 1, got 0"),
        ({"page_size": 8, "num_levels": 1}, "num_levels: expected an int >= 2, got 1"),
        ({"page_size": 8, "max_groups": -1}, "max_groups: expected an int >= 0, got -1"),
    ],
)
def test_wrong_sizes_of_levels_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        cascade_levels(np.zeros((2, 2), np.int32), np.zeros(2, np.int32), **options)
