# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, ALiBi and sinks in the CUDA attention kernels, run by the emulator (ffi/emu).

As test_cuda_emulated.py: against float64 softmax, under several orders of CTAs, warps and
copies, with the race checker on. What lies left of a window is NaN, under page ids that do not
exist, and the emulator counts which bytes of the pools a kernel asks for.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits
from emulation import Device, emulate
from pinned_batches import PAGE, PINNED, WINDOW, slid, small_batch
from tiers import first_of
from touched import assert_reads_windows_only, tokens_of, windows_begin

from jax_paged.layout import from_slots_first, slots_first
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
    cover_pairs,
    draw_sinks,
    eight_bit,
    random_parents,
    trees_of,
    with_holes,
)

I32_MAX, I32_MIN = 2**31 - 1, -(2**31)
SMALL = Case("small", 8, 2, 64, page_size=8)
FACTORS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 1, 7, 64, 150, I32_MAX, 0, -1),
    "soft_cap": (None, 0.7, 30.0, 5000.0),
    "alibi": (False, True),
    "sinks": (None, "moderate", "large", "none"),
    "causal": (True, False),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dim": ((64, None), (80, None), (128, None), (192, None), (40, 72)),
    "group": (1, 4, 5, 8, 17),
    "layout": ("HND", "NHD", "vllm5d"),
    "page_size": (1, 5, 8, 16, 32),
    "split": ({}, {"num_kv_splits": 1}, {"num_kv_splits": 3}, {"split_tokens": 64}),
    "rows": ("decode", "short", "prefill", "mixed"),
    "num_workers": (1, 3, 9),
    "holes": (False, True),
    "sm_scale": (None, 0.0, -0.3),
}
PAIRS = 90  # rows of the table; all pairs take fewer


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    return cover_pairs(FACTORS, PAIRS, seed=11)


def lengths(kind: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Query and KV lengths of a batch: of one token per row, of a few, of many, or of all kinds."""
    if kind == "decode":
        return [1, 1, 1], [int(rng.integers(1, 330)), 0, 64]
    if kind == "short":
        return [3, 2, 4], [int(rng.integers(4, 230)), 2, 1]
    if kind == "prefill":
        return [30, 7], [30, 120]
    return [1, 21, 0, 2, 5], [170, int(rng.integers(21, 140)), 17, 0, 3]


def slopes_and_sinks(num_q_heads: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {
        "alibi_slopes": np.float32(2.0 ** -np.linspace(1, 8, num_q_heads)),
        "sinks": rng.standard_normal(num_q_heads, "f4"),
    }


def without_left(batch: Batch, window: int | None, page_ids: bool = True) -> Batch:
    """The batch with NaN in all tokens left of the rows' windows, and their pages gone."""
    if window is None or window <= 0:
        return batch
    page = batch.case.page_size
    begins = windows_begin(batch, window)
    seen = tokens_of(batch, begins, batch.seq_lens)
    changed = {}
    for name in ("k", "v"):
        pages = slots_first(getattr(batch, f"{name}_pages"), batch.case.layout, name)
        pages = np.where(seen[..., None, None], pages, np.asarray(np.nan, pages.dtype))
        pages = from_slots_first(pages, batch.case.layout, name)
        changed[f"{name}_pages"] = np.ascontiguousarray(pages)
    if page_ids:
        gone = (np.arange(batch.page_table.shape[1]) + 1) * page <= begins[:, None]
        changed["page_table"] = np.where(gone, WILD_PAGE, batch.page_table).astype(np.int32)
    return dataclasses.replace(batch, **changed)


def check(batch, options, device=None, **split):
    """Runs a batch and compares it with the oracle; returns (out, lse)."""
    result = emulate(batch, Device() if device is None else device, **options, **split)
    expected = dense_oracle(batch, **options)
    assert_attention_close(*result, *expected, is_turned="rope" in options)
    return result


@pytest.mark.parametrize("index", first_of(range(len(table())), 12))
def test_all_pairs_of_options_match_float64_softmax_whatever_the_order(index):
    row, rng = table()[index], np.random.default_rng([index, 3])
    num_kv_heads = 1 if row["group"] > 8 else 2
    head_dim, v_head_dim = row["head_dim"]
    num_q_heads = num_kv_heads * row["group"]
    case = Case(
        "pairwise", num_q_heads, num_kv_heads, head_dim, row["page_size"], v_head_dim,
        row["layout"], causal=row["causal"],
    )  # fmt: skip
    q_lens, seq_lens = lengths(row["rows"], rng)
    batch = make_batch(
        case, jnp.dtype(row["dtype"]), q_lens, seq_lens, num_tokens=sum(q_lens) + 2, seed=index
    )
    if row["sm_scale"] is not None:
        batch = dataclasses.replace(batch, sm_scale=row["sm_scale"])
    if row["holes"]:
        batch = with_holes(batch, rng)
    batch = without_left(batch, row["sliding_window"])
    options: dict[str, Any] = {name: row[name] for name in ("sliding_window", "soft_cap")}
    if row["alibi"]:
        options["alibi_slopes"] = slopes_and_sinks(num_q_heads)["alibi_slopes"]
    if row["sinks"]:
        options["sinks"] = draw_sinks(row["sinks"], num_q_heads, rng)
    device = Device(num_workers=row["num_workers"], stages=2 + index % 3, seed=index)
    try:
        first = check(batch, options, device, **row["split"])
    except AssertionError as error:
        raise AssertionError(f"{row}: {error}") from None
    other = dataclasses.replace(device, plan_ctas=1, seed=index + 1)
    assert_same_bits(emulate(batch, other, **options, **row["split"]), first)


@pytest.mark.parametrize("split", [{}, {"num_kv_splits": 2}, {"split_tokens": 64}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size"),
    [
        ("bfloat16", "HND", 16), ("float16", "NHD", 5), ("bfloat16", "vllm5d", 8),
        ("bfloat16", "vllm5d", 5), ("float32", "HND", 4),
    ],
)  # fmt: skip
def test_only_tokens_from_where_the_windows_begin_are_read(dtype, layout, page_size, causal, split):
    case = dataclasses.replace(SMALL, layout=layout, page_size=page_size, causal=causal)
    batch = make_batch(case, jnp.dtype(dtype), [1, 3, 30, 0, 2], [290, 150, 200, 80, 1], seed=6)
    device = Device(num_workers=7)
    for window in (1, 60, 128):
        whole, lost = {}, {}
        first = emulate(batch, device, sliding_window=window, **split, buffers=whole)
        assert_reads_windows_only(batch, window, whole)
        assert_attention_close(*first, *dense_oracle(batch, sliding_window=window))
        gone = without_left(batch, window)
        assert_same_bits(emulate(gone, device, sliding_window=window, **split, buffers=lost), first)
        assert_reads_windows_only(gone, window, lost)
    plain: dict[str, Any] = {}
    emulate(batch, device, **split, buffers=plain)
    with pytest.raises(AssertionError, match="read outside of the windows"):
        assert_reads_windows_only(batch, 60, plain)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_edge_of_tiles_and_windows_matches(head_dim, window):
    rows = [(q, p) for q in (1, 2, 9, 70) for p in (0, 1, 62, 63, 64, 65, 127, 128, 200)]
    case = Case("edges", 4, 1, head_dim, page_size=8)
    q_lens, seq_lens = [q for q, _ in rows], [q + p for q, p in rows]
    batch = without_left(make_batch(case, jnp.bfloat16, q_lens, seq_lens, seed=window), window)
    check(batch, {"sliding_window": window}, Device(num_workers=6, seed=window))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fixed_splits_give_a_row_the_same_bits_in_any_batch_and_on_any_device(dtype):
    batch = make_batch(SMALL, jnp.dtype(dtype), [1, 1, 20, 2], [300, 77, 150, 500], seed=6)
    options = {**slopes_and_sinks(), "sliding_window": 100, "soft_cap": 5.0}
    out, lse = check(batch, options, split_tokens=64)
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_q_lens)):
        device = Device(num_workers=2 + row, stages=2 + row % 3)
        result = emulate(batch.alone(row), device, **options, split_tokens=64)
        assert_same_bits(result, (out[start:end], lse[start:end]))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("split", [{}, {"num_kv_splits": 3}, {"split_tokens": 64}], ids=str)
def test_bits_do_not_depend_on_the_order_of_ctas_warps_and_copies(split, dtype):
    batch = make_batch(SMALL, jnp.dtype(dtype), [1, 1, 2, 21], [400, 3, 130, 90], seed=1)
    options = {**slopes_and_sinks(), "sliding_window": 200, "soft_cap": 2.0}
    first = check(batch, options, Device(num_workers=7, seed=0), **split)
    for seed in range(1, 7):
        device = Device(num_workers=7, plan_ctas=1 + seed % 4, seed=seed)
        assert_same_bits(emulate(batch, device, **options, **split), first)


@pytest.mark.parametrize("num_workers", [1, 2, 7, 40])
def test_any_number_of_workers_serves_windows(num_workers):
    batch = make_batch(SMALL, jnp.bfloat16, [1, 1, 2, 0, 1], [900, 1, 66, 7, 450], seed=2)
    for window in (3, 200):
        options = {"sliding_window": window, "sinks": slopes_and_sinks()["sinks"]}
        check(without_left(batch, window), options, Device(num_workers=num_workers))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensor_cores_take_rows_that_slid(dtype, head_dim):
    batch, offsets = slid(small_batch(dtype, head_dim=head_dim))
    options = {"sliding_window": WINDOW, "num_pinned": PINNED, "slot_offset": offsets}
    buffers: dict[str, Any] = {}
    out, lse = emulate(batch, Device(num_workers=3, seed=2), buffers=buffers, **options)
    assert buffers["chosen_stages"] > 0
    assert buffers["chosen_prefill_rows"] > 0
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


@pytest.mark.parametrize("kind", ["pins", "trees", "both"])
@pytest.mark.parametrize(("head_dim", "kv"), [(64, None), (256, None), (64, "int8"),
                                              (192, "float8_e4m3fn")])  # fmt: skip
def test_many_queries_see_their_trees_and_pinned_tokens(head_dim, kv, kind):
    """Units of the prefill kernel whose window leaves tiles out, and whose ends are in the tree."""
    case = dataclasses.replace(SMALL, head_dim=head_dim, v_head_dim=head_dim)
    batch = make_batch(case, jnp.float16, [150, 70, 40, 3], [700, 71, 400, 3], seed=3)
    rng = np.random.default_rng(head_dim)
    stored, real, scales = eight_bit(batch, kv, "token", rng) if kv else (batch, batch, {})
    options: dict[str, Any] = {"sliding_window": np.int32([130, 40, 0, 50])}
    if kind != "trees":
        options["num_pinned"] = np.int32([70, 0, 5, 900])
    if kind != "pins":
        options |= trees_of([random_parents(rng, n, "any") for n in (100, 71, 0, 2)], 110)
    buffers: dict[str, Any] = {}
    device = Device(num_workers=3, seed=2)
    out, lse = emulate(stored, device, buffers=buffers, **options, **scales)
    assert buffers["chosen_prefill_rows"] > 0
    assert_attention_close(out, lse, *dense_oracle(real, **options))


def test_alibi_leaves_rows_with_pinned_tokens_to_decode():
    """It asks where each token stands, for which the prefill kernel has no register."""
    batch, offsets = slid(small_batch("float16", head_dim=64))
    options = {"sliding_window": WINDOW, "num_pinned": PINNED, "slot_offset": offsets}
    options["alibi_slopes"] = slopes_and_sinks()["alibi_slopes"]
    buffers: dict[str, Any] = {}
    out, lse = emulate(batch, Device(num_workers=3), buffers=buffers, **options)
    assert buffers["chosen_stages"] > 0
    assert buffers["chosen_prefill_rows"] == 0
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


@pytest.mark.parametrize(("q_len", "first"), [(1, 350), (40, 311)])
def test_pinned_tokens_and_the_window_alone_are_read(q_len, first):
    case = dataclasses.replace(SMALL, page_size=PAGE)
    batch = make_batch(case, jnp.bfloat16, [q_len], [400], seed=1)
    buffers: dict[str, Any] = {}
    options = {"sliding_window": np.int32([70]), "num_pinned": np.int32([20])}
    emulate(batch, Device(seed=1), buffers=buffers, **options)
    touched = slots_first(buffers["k_touched"], "HND", "k").any((-2, -1))
    tokens = np.flatnonzero(touched[batch.page_table[0]].reshape(-1))
    np.testing.assert_array_equal(tokens, np.r_[0:20, first:400])
