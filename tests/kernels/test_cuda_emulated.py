# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention kernels in the emulator (ffi/emu): launches, orders, devices, tile edges.

The suites of tests/ops ask of all implementations, and so of these kernels, what the ops should do.
What no test here can see is speed, registers and whether a GPU agrees; all else is the very source
that nvcc compiles.
"""

import dataclasses
import itertools
from typing import Any

import emulation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits
from emulation import Device, EmulationError, emulate, library, limits

from jax_paged import linear, moe_experts
from jax_paged.layout import LAYOUTS, is_one_pool
from jax_paged.ops.attention import _cuda_workspace_words
from jax_paged.ops.plan import plan_words
from jax_paged.testing import (
    TOLERANCES,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)
from jax_paged.testing.experts import make_case
from jax_paged.testing.options import eight_bit

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 16, 71)
PAGE_SIZES = (1, 5, 8, 16, 32, 544)
SMALL = Case("small", 8, 2, 64, page_size=8)


def check(batch, device=None, **options):
    """Runs a batch and compares it with the oracle; returns (out, lse)."""
    result = emulate(batch, Device() if device is None else device, **options)
    assert_attention_close(*result, *dense_oracle(batch))
    return result


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_matches_float64_softmax_whatever_the_order(head_dim, group, page_size):
    # Dtype, layout, KV heads, stages and workers go through their values as the sizes do.
    count = (HEAD_DIMS.index(head_dim) * 8 + GROUPS.index(group)) * 6 + PAGE_SIZES.index(page_size)
    heads = 1 + count % 3 if group < 16 else 1
    layout = LAYOUTS[count // 2 % len(LAYOUTS)]
    case = Case("sizes", group * heads, heads, head_dim, page_size, layout=layout)
    dtype = ("bfloat16", "float16")[count % 2]
    long = page_size + 40 if page_size > 64 else 3 * max(page_size, 16) + count % 50
    batch = make_batch(case, jnp.dtype(dtype), [1, 1, 1, 1], [long, 0, 1, 64], seed=count)
    device = Device(num_workers=1 + count % 9, stages=1 + count % 4, seed=count)
    first = check(batch, device)
    assert_same_bits(emulate(batch, dataclasses.replace(device, seed=count + 1)), first)


@pytest.mark.parametrize(
    "head_dims", [(8, 8), (32, 32), (40, 24), (72, 72), (16, 144), (192, 128), (248, 200)]
)
@pytest.mark.parametrize(
    ("kv", "layout"), [*((None, layout) for layout in LAYOUTS), ("int8", "HND"), ("int8", "NHD")]
)
def test_rows_that_are_shorter_than_their_kernels(kv, layout, head_dims):
    """The kernels of the next head_dim serve them; K and V may differ, but in one pool."""
    head_dim, v_head_dim = (-(-d // 16) * 16 for d in head_dims) if kv else head_dims
    if is_one_pool(layout):
        head_dim = v_head_dim = max(head_dims)
    count = head_dim + v_head_dim + LAYOUTS.index(layout)
    page_size = (8, 16, 5 if layout != "vllm5d" else 24)[count // 8 % 3]
    case = Case("short", 8, 2, head_dim, page_size, layout=layout, v_head_dim=v_head_dim)
    dtype = jnp.dtype(("bfloat16", "float16")[count // 8 % 2])
    batch = make_batch(case, dtype, [1, 2, 0, 30, 9], [330, 40, 3, 75, 70], num_tokens=44)
    stored, real, scales = batch, batch, {}
    if kv:
        stored, real, scales = eight_bit(batch, kv, "token", np.random.default_rng(count))
    buffers: dict[str, Any] = {}
    device = Device(num_workers=1 + count % 5, seed=count)
    result = emulate(stored, device, buffers=buffers, **scales)
    assert buffers["chosen_stages"] > 0
    assert buffers["chosen_prefill_rows"] > 0
    # Weights are rounded to the dtype, too: over so few dimensions that does not average out.
    roundings = 2 if v_head_dim == 8 else 1
    assert_attention_close(*result, *dense_oracle(real), roundings=roundings)


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"split_tokens": 128}], ids=str)
def test_bits_do_not_depend_on_the_order_of_ctas_warps_and_copies(options, dtype, layout):
    case = dataclasses.replace(SMALL, layout=layout)
    batch = make_batch(case, jnp.dtype(dtype), [1, 1, 2, 1], [700, 3, 130, 300], seed=1)
    first = check(batch, Device(num_workers=7, seed=0), **options)
    for seed in range(1, 13):
        device = Device(num_workers=7, plan_ctas=1 + seed % 4, seed=seed)
        assert_same_bits(emulate(batch, device, **options), first)


@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 544])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_vllm5d_gives_the_bits_of_hnd(head_dim, page_size):
    # Every row length up to two tiles and a half: each edge of the 8 tokens that V is loaded by.
    lengths = range(1, 160, 1 if head_dim == 64 and page_size == 8 else 13)
    case = Case("edges", 2, 1, head_dim, page_size)
    results = []
    for layout in ("HND", "vllm5d"):
        batch = make_batch(
            dataclasses.replace(case, layout=layout), jnp.bfloat16, [1] * len(lengths), lengths
        )  # fmt: skip
        results.append(check(batch, Device(seed=head_dim)))
    assert_same_bits(*results)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 24, 40, 264])
def test_any_number_of_workers_serves(num_workers):
    batch = make_batch(SMALL, jnp.bfloat16, [1, 1, 1, 0, 1], [900, 1, 0, 7, 64], seed=2)
    check(batch, Device(num_workers=num_workers, stages=2))


@pytest.mark.parametrize(
    ("kib", "shapes"),  # (stages, CTAs per multiprocessor) for each of HEAD_DIMS
    [
        (228, [(4, 2), (4, 2), (3, 2), (3, 2), (3, 2), (4, 1), (3, 1)]),  # sm_90, 100
        (164, [(4, 2), (3, 2), (4, 1), (4, 1), (4, 1), (3, 1), (2, 1)]),  # sm_80
        (100, [(4, 1), (3, 1), (3, 1), (2, 1), (2, 1), (1, 1), (1, 1)]),  # sm_120
    ],
)
def test_the_shared_memory_of_a_device_decides_the_launch(kib, shapes):
    for head_dim, shape in zip(HEAD_DIMS, shapes, strict=True):
        batch = make_batch(Case("limits", 8, 2, head_dim), jnp.bfloat16, [1, 8], [3, 8])
        chosen = {}
        emulate(batch, Device(**limits(kib)), buffers=chosen)
        assert (chosen["chosen_stages"], chosen["chosen_ctas"]) == shape, head_dim
        assert chosen["chosen_prefill_rows"] == (128 if head_dim <= 128 else 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kib", "head_dim", "decodes", "prefills"),
    [
        (100, 192, True, True), (100, 256, True, True), (90, 128, True, False),
        (60, 256, False, False),
    ],
)  # fmt: skip
def test_kernels_that_do_not_fit_leave_their_rows_to_others(
    kib, head_dim, decodes, prefills, layout
):
    case = Case("small device", 6, 2, head_dim, page_size=8, layout=layout)
    batch = make_batch(case, jnp.bfloat16, [1, 0, 30, 3, 1], [150, 4, 90, 70, 1], seed=head_dim)
    chosen = {}
    check(batch, Device(**limits(kib)), buffers=chosen)
    assert (chosen["chosen_stages"] > 0) == decodes
    assert (chosen["chosen_prefill_rows"] > 0) == prefills


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
def test_few_queries_on_a_long_context_are_spread_over_the_workers(layout):
    # Of row 0 the prefill kernel has 2 units of 32 tiles, the decode kernel 4 of 32 pieces. A team
    # of workers takes the two heads together. Each unit of the decode kernel costs two more, but
    # not that of row 1 where a team has it to itself.
    case = dataclasses.replace(SMALL, layout=layout)
    batch = make_batch(case, jnp.bfloat16, [5, 1, 40], [2000, 100, 60], seed=3)
    decode_positions = {}
    for num_workers in (2, 24):
        buffers = {}
        first = check(batch, Device(num_workers=num_workers, seed=5), buffers=buffers)
        assert buffers["chosen_prefill_rows"] > 0
        decode_positions[num_workers] = int(buffers["workspace"][:2].view(np.int64)[0])
        assert_same_bits(emulate(batch, Device(num_workers=num_workers, seed=6)), first)
    assert decode_positions == {2: 2, 24: 2 + 2 + 2 * (32 + 2)}


@pytest.mark.parametrize(
    ("num_workers", "last", "chunk"),
    [
        (14, 640, 10),  # 72 positions for 7 teams: 11 each, but a unit has 10 pieces
        (30, 640, 5),  # 15 teams: two for each unit, of which each has half of the 10 pieces
        (26, 640, 5),  # 13 teams, and one has nothing to do
        (38, 640, 4),  # 19 teams: three for each unit, which is padded to 12 positions
        (14, 500, 10),  # rows of two lengths: 70 positions, as many for each
        (8, 640, 18),  # 4 teams: with whole units a team would have 24
    ],
)
def test_units_of_rows_of_one_length_begin_where_workers_do(num_workers, last, chunk):
    batch = make_batch(SMALL, jnp.bfloat16, [1] * 6, [640] * 5 + [last], seed=8)
    buffers = {}
    check(batch, Device(num_workers=num_workers), buffers=buffers)
    assert int(buffers["workspace"][2:4].view(np.int64)[0]) == chunk


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("split_tokens", [64, 512])
def test_split_tokens_makes_a_row_independent_of_its_batch_and_of_the_device(split_tokens, dtype):
    batch = make_batch(SMALL, jnp.dtype(dtype), [1, 1, 20, 1, 2], [700, 33, 90, 800, 64], seed=6)
    out, lse = emulate(batch, split_tokens=split_tokens)
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_q_lens)):
        device = Device(num_workers=2 + row, stages=2 + row % 3)
        row_result = emulate(batch.alone(row), device, split_tokens=split_tokens)
        assert_same_bits(row_result, (out[start:end], lse[start:end]))


def test_more_rows_than_the_planner_has_threads():
    rng = np.random.default_rng(12)
    seq_lens = rng.integers(0, 40, 600) * rng.integers(0, 2, 600)
    case = Case("many", 2, 1, 64)
    batch = make_batch(case, jnp.bfloat16, rng.integers(0, 3, 600), seq_lens, num_seqs=590, seed=12)
    first = check(batch, Device(plan_ctas=3))
    assert_same_bits(emulate(batch, Device(plan_ctas=1, seed=4)), first)


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 5}, {"split_tokens": 70}], ids=str)
@pytest.mark.parametrize("group", [1, 16, 17])
def test_workspace_is_what_python_asks_for(group, options):
    sizes = {"max_seqs": 5, "num_kv_heads": 3, "group_size": group, "v_head_dim": 72}
    options = {"num_kv_splits": 0, "split_tokens": 0} | options
    for max_tree, unit_rows in ((0, 16), (70, 16), (0, 32), (0, 64)):
        asked = sizes | {"capacity": 1000} | options
        asked |= {"max_tree": max_tree, "unit_rows": unit_rows}
        words = _cuda_workspace_words(**asked)
        assert words == library().attention_workspace_words(*asked.values())
        of_plan = plan_words(5, max_tree)
        assert of_plan == library().attention_plan_words(5, max_tree)
        assert _cuda_workspace_words(**asked, has_plan=True) == words - of_plan


def test_workspace_does_not_grow_with_context_and_hardly_with_the_batch():
    sizes = {"num_kv_heads": 8, "group_size": 8, "v_head_dim": 128}
    small = _cuda_workspace_words(max_seqs=1, capacity=100, **sizes)
    large = _cuda_workspace_words(max_seqs=1001, capacity=10**6, **sizes)
    assert large - small == 13 * 1000
    assert small * 4 < 7_000_000


# ---- prefill: rows with more than 16 packed rows ----

PREFILL_GROUPS = (1, 4, 7, 8)
PREFIXES = (0, 1, 31, 33, 63, 64, 65)  # keys before the row's first query: around the KV tiles


def tile_rows(head_dim):
    """Packed rows of a prefill unit."""
    return 128 if head_dim <= 128 else 64


@pytest.mark.parametrize("page_size", [1, 5, 16, 32, 544])
@pytest.mark.parametrize("group", PREFILL_GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_matches_float64_softmax_whatever_the_order(head_dim, group, page_size):
    # Dtype, layout, tile edges and prefixes go through their values as the sizes do.
    count = HEAD_DIMS.index(head_dim) * 20 + PREFILL_GROUPS.index(group) * 5 + page_size % 5
    rows = tile_rows(head_dim)
    packed_rows = (17, rows - 1, rows, rows + 1, 2 * rows + 3)[count % 5]
    q_len = max(2, -(-packed_rows // group))
    prefix = PREFIXES[count % len(PREFIXES)]
    case = Case("prefill", group, 1, head_dim, page_size, layout=("HND", "NHD")[count // 2 % 2])
    dtype = jnp.dtype(("bfloat16", "float16")[count // 3 % 2])
    q_lens, seq_lens = [1, q_len, 0, 2], [70, prefix + q_len, 9, 33]
    batch = make_batch(case, dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 2, seed=count)
    device = Device(num_workers=1 + count % 4, stages=2, seed=count)
    first = check(batch, device)
    assert_same_bits(emulate(batch, dataclasses.replace(device, seed=count + 1)), first)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 3])
def test_every_edge_of_tiles_and_diagonal_matches_in_one_mixed_batch(group, causal):
    edges = [16, 17, 18, 63, 64, 65, 127, 128, 129, 200]
    rows = [(-(-n // group), prefix) for n in edges for prefix in (0, 1, 62, 63, 64, 65, 130)]
    rows += [(1, 99), (0, 5), (2, 64)] * 5
    order = np.random.default_rng(group).permutation(len(rows))
    q_lens = [rows[i][0] for i in order]
    seq_lens = [sum(rows[i]) for i in order]
    case = Case("edges", group, 1, 64, page_size=16, causal=causal, num_layers=2)
    batch = make_batch(case, jnp.bfloat16, q_lens, seq_lens, seed=15)
    check(batch, Device(num_workers=6))


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (192, "bfloat16")])
def test_prefill_bits_do_not_depend_on_workers_or_order(head_dim, dtype, layout):
    case = Case("order", 8, 2, head_dim, layout=layout)
    batch = make_batch(case, jnp.dtype(dtype), [50, 7, 33], [170, 7, 40], seed=16)
    first = check(batch, Device(num_workers=1, seed=0))
    for seed in range(1, 9):
        device = Device(num_workers=1 + seed, plan_ctas=1 + seed % 3, seed=seed)
        assert_same_bits(emulate(batch, device), first)


@pytest.mark.parametrize("q_lens", [[2, 0], [3, 0], [1, 1], [16, 1]], ids=str)
@pytest.mark.parametrize("group", [8, 16, 17, 71])
def test_rows_around_the_border_between_decode_and_prefill_match(group, q_lens):
    case = Case("border", group, 1, 64, page_size=8)
    check(make_batch(case, jnp.bfloat16, q_lens, [90, 70], seed=17))


def test_a_nan_key_is_unseen_by_earlier_queries_and_a_nan_value_by_earlier_tiles():
    case = Case("nan", 2, 2, 64, page_size=16)
    batch = make_batch(case, jnp.bfloat16, [200], [200], seed=20)
    expected, _ = check(batch)
    where = (batch.page_table[0, 190 // 16], 0, 190 % 16)
    for pages, first in [(batch.k_pages, 190), (batch.v_pages, 128)]:
        kept = pages[where].copy()
        pages[where] = np.nan
        out, _ = emulate(batch)
        pages[where] = kept
        assert np.isnan(out[190:, 0].astype("f4")).all()
        np.testing.assert_array_equal(out[:first].view(np.uint8), expected[:first].view(np.uint8))
        np.testing.assert_array_equal(out[:, 1].view(np.uint8), expected[:, 1].view(np.uint8))


def test_long_rows_are_listed_first_also_when_there_are_more_than_the_planner_has_threads():
    rng = np.random.default_rng(22)
    q_lens, seq_lens = rng.choice([0, 1, 9, 20], 300), rng.integers(0, 90, 300)
    batch = make_batch(Case("many", 2, 1, 64), jnp.bfloat16, q_lens, seq_lens, num_seqs=290)
    buffers = {}
    result = emulate(batch, Device(plan_ctas=3, num_workers=9), buffers=buffers)
    assert_attention_close(*result, *dense_oracle(batch))
    rows = [row for row in range(290) if q_lens[row] > 1 and seq_lens[row] > 0]
    rows.sort(key=lambda row: -int(seq_lens[row]).bit_length())  # stable
    order = buffers["workspace"][8 + 12 * 301 :]  # CarvePlan of args.h
    np.testing.assert_array_equal(order[: len(rows)], rows)


def test_an_operand_that_there_is_not_is_refused():
    operands = {}
    emulate(make_batch(SMALL, jnp.float32, [5], [1]), buffers=operands)
    names = (
        "q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens", "num_seqs", "layer",
        "sm_scale",
    )  # fmt: skip
    results = {name: operands[name] for name in ("out", "lse", "workspace")}
    given = {name: operands[name] for name in names}
    emulation.call("attention", given, {}, results)
    given["sink"] = np.zeros(8, np.float32)
    with pytest.raises(EmulationError, match='operand "sink": there is no such one'):
        emulation.call("attention", given, {}, results)


SHAPES = (
    "q bfloat16 2 4 64,k_pages bfloat16 5 2 16 64,v_pages bfloat16 5 2 16 64,page_table int32 2 3,"
    "layer int32,sm_scale float32,out bfloat16 2 4 64,lse float32 2 4"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int32 2 3", "int31 2 3", 'expected name, dtype and sizes, got "page_table int31 2 3"'),
        ("5 2 16 64,v", "5 2 x 64,v", 'name, dtype and sizes, got "k_pages bfloat16 5 2 x 64"'),
        ("q bfloat16", "q bfloat16 1 1 1 1", 'sizes, got "q bfloat16 1 1 1 1 2 4 64"'),
        ("q bfloat16 2 4 64", "q int32 2 4 64", "q expected bfloat16, float16 or float32"),
        ("5 2 16 64,v", "5 2 16 32,v", r"q expected shape \[2, 4, 32\], got \[2, 4, 64\]"),
        ("sm_scale", "some_scale", "sm_scale expected an operand, got none"),
        ("out bfloat16 2 4 64", "out bfloat16 2 4 32", "out expected shape"),
        ("2 3,", "2 3,sinks int32 4,", "sinks expected float32, got int32"),
        ("2 3,", "2 3,stranger int32,", 'operand "stranger": there is no such one'),
        ("2 3,", "2 134217728,", "page_table expected at most 1073741824 tokens a row"),
        ("2 3,", "4 3,", r"seq_lens expected shape \[4\], got \[2\]"),
    ],
)
def test_a_plan_reads_the_shapes_of_its_calls(old, new, message):
    operands = {
        "seq_lens": np.int32([3, 7]), "cu_q_lens": np.int32([0, 1, 2]), "num_seqs": np.int32([2])
    }  # fmt: skip
    results = {"plan": emulation.poisoned((plan_words(2),), np.int32)}
    emulation.call("attention_plan", operands, {"shapes": SHAPES}, results)
    assert SHAPES.count(old) == 1
    with pytest.raises(EmulationError, match=message):
        emulation.call("attention_plan", operands, {"shapes": SHAPES.replace(old, new)}, results)
    short = {"plan": results["plan"][:-4]}
    with pytest.raises(EmulationError, match="plan expected at least 48 words, got 44"):
        emulation.call("attention_plan", operands, {"shapes": SHAPES}, short)


def test_what_the_emulator_says_of_an_op_reaches_its_caller():
    case = make_case(1, 8193, 1, hidden=8, inner=8)
    with pytest.raises(Exception, match="down expected at most 8192 experts on CUDA, got 8193"):
        jax.block_until_ready(moe_experts(*case, implementation="emulated"))
    x = jnp.ones((1, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"linear\.v2: there is no emulated"):
        linear(x, x, implementation="emulated")
    with pytest.raises(ValueError, match="None or 'native' or 'reference', got 'simulated'"):
        linear(x, x, implementation="simulated")  # type: ignore[arg-type]
