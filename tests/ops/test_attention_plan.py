# SPDX-License-Identifier: Apache-2.0
"""Plans of attention: with one, a call has the bits that it has without; it must fit the call."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import attend_planned, call_of, plan_of

from jax_paged import AttentionPlan, attention_plan, paged_attention, ragged_paged_attention
from jax_paged.ops.attention_plan import _attributes
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import (
    ATTENTION_FACTORS,
    attention_case,
    cover_pairs,
    random_parents,
    trees_of,
)

pytestmark = pytest.mark.cuda
SMALL = Case("small", 8, 2, 64, page_size=8)
# Rows of one query, of a few, of many; without queries, without keys, with more queries than keys.
Q_LENS, SEQ_LENS = [1, 3, 60, 0, 1, 1, 7], [700, 130, 90, 40, 0, 64, 4]
SLOPES = np.float32(2.0 ** -np.linspace(1, 8, 8))
WINDOWS = np.int32([90, 40, 33, 20, 20, 0, 1])
PINNED = {"num_pinned": np.int32([20, 16, 1, 9, 3, 0, 0]), "sliding_window": WINDOWS}


def trees(seed, sizes=(1, 3, 12, 0, 0, 5, 4)):
    rng = np.random.default_rng(seed)
    return trees_of([random_parents(rng, n, "forest") for n in sizes], max_tree=16)


VARIANTS = {
    "plain": {},
    "three splits": {"num_kv_splits": 3},
    "uncut": {"num_kv_splits": 1},
    "split tokens": {"split_tokens": 128},
    "a window": {"sliding_window": np.int32(50)},
    "windows": {"sliding_window": WINDOWS},
    "pins": PINNED,
    "slid": PINNED | {"slot_offset": np.int32([64, 0, 8, 0, 0, 0, 0])},
    "trees": trees(0),
    "trees in windows": trees(1) | {"sliding_window": WINDOWS},
    "trees and splits": trees(2) | {"split_tokens": 70, "alibi_slopes": SLOPES},
    "alibi, soft cap": {"alibi_slopes": SLOPES, "soft_cap": 20.0},
    "sinks": {"sinks": np.float32(np.arange(8))},
    "few queries": {"max_q_len": 2},
}


@pytest.fixture(autouse=True)
def one_device(request):
    """The calls on the simulated device take turns among several; a plan is of one."""
    if "implementation" not in request.fixturenames or (
        request.getfixturevalue("implementation") != "sim"
    ):
        yield
        return
    from simulation import ARCHITECTURES, device, library, set_devices

    set_devices(library(), device(90))
    yield
    set_devices(library(), *map(device, ARCHITECTURES))


def small_batch(dtype=jnp.bfloat16, q_lens=Q_LENS, seq_lens=SEQ_LENS, seed=3, **case):
    return make_batch(
        dataclasses.replace(SMALL, **case), jnp.dtype(dtype), q_lens, seq_lens,
        num_tokens=sum(Q_LENS) + 3, pages_per_seq=90, num_pages=400, num_seqs=len(q_lens) - 1,
        seed=seed,
    )  # fmt: skip


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def check_plan(batch, options, **more):
    """By a plan the call has the bits that it has without; returns them."""
    arguments, call = call_of(batch, options, **more)
    expected = ragged_paged_attention(*arguments, **call)
    plan = plan_of(arguments, call)
    got = ragged_paged_attention(*arguments, **call, plan=plan)
    assert_same_bits(got, expected)
    return got, plan


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_plan_changes_no_bit(options, dtype, implementation):
    got, _ = check_plan(small_batch(dtype), options, implementation=implementation)
    assert np.isfinite(np.asarray(got[0]).astype("f4")).all()


@pytest.mark.parametrize("seq_len", [449, 1280])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_rows_of_one_length_may_begin_where_workers_do(rows, seq_len, implementation):
    case = dataclasses.replace(SMALL, page_size=16)
    seq_lens = [seq_len] * rows + [0]
    batch = make_batch(case, jnp.float16, [1] * len(seq_lens), seq_lens, seed=rows)
    got, _ = check_plan(batch, {}, implementation=implementation)
    assert_attention_close(*map(np.asarray, got), *dense_oracle(batch))


@pytest.mark.parametrize("layout", ["NHD", "vllm5d"])
@pytest.mark.parametrize("head_dim", [40, 128, 192])
def test_a_plan_goes_by_the_kernel_that_serves_the_call(head_dim, layout, implementation):
    batch = small_batch(head_dim=head_dim, layout=layout)
    got, _ = check_plan(batch, {}, implementation=implementation)
    assert_attention_close(*map(np.asarray, got), *dense_oracle(batch))


@pytest.mark.deep
@pytest.mark.parametrize("number", range(60))
def test_a_plan_changes_no_bit_whatever_the_options(number, implementation):
    row = cover_pairs(ATTENTION_FACTORS, 60, seed=11)[number]
    batch, _, options, more = attention_case(row, number)
    check_plan(batch, options | more, implementation=implementation)


def test_one_plan_serves_all_layers(implementation):
    batch = small_batch(num_layers=3)
    arguments, call = call_of(batch, {}, implementation=implementation)
    del call["layer"]
    plan = plan_of(arguments, call)

    @jax.jit
    def layers(plan):
        outs = [
            ragged_paged_attention(*arguments, **call, layer=i, plan=plan)[0] for i in (0, 1, 2)
        ]
        return jnp.stack(outs)

    expected = [ragged_paged_attention(*arguments, **call, layer=i)[0] for i in (0, 1, 2)]
    assert_same_bits(layers(plan), jnp.stack(expected))


def test_a_layer_that_is_not_there_gives_zeros(implementation):
    sinks = np.arange(8, dtype=np.float32)
    batch = small_batch(num_layers=2)
    arguments, call = call_of(batch, {"sinks": sinks}, implementation=implementation)
    plan = plan_of(arguments, call)
    for layer in (-1, 2, 2**31 - 1):
        call |= {"layer": jnp.int32(layer)}
        expected = ragged_paged_attention(*arguments, **call)
        got = ragged_paged_attention(*arguments, **call, plan=plan)
        assert_same_bits(got, expected)
        assert not np.asarray(got[0]).astype("f4").any()


def test_a_plan_of_paged_attention(implementation):
    batch = make_batch(SMALL, jnp.bfloat16, [1] * 5, [700, 0, 64, 65, 1], seed=1)
    arguments = batch.operands()
    options = {"sm_scale": 0.1, "return_lse": True, "implementation": implementation}
    plan = attention_plan(*arguments, implementation=implementation)
    of_shape = attention_plan(
        jax.ShapeDtypeStruct(batch.q.shape, batch.q.dtype), *arguments[1:],
        implementation=implementation,
    )  # fmt: skip
    expected = paged_attention(*arguments, **options)
    for made in (plan, of_shape):
        assert_same_bits(paged_attention(*arguments, **options, plan=made), expected)


def test_a_plan_of_no_rows_and_of_no_tokens(implementation):
    pages = jnp.ones((2, 2, 4, 16), jnp.float32)
    for rows, tokens in ((0, 0), (0, 3), (2, 0)):
        q = jnp.ones((tokens, 4, 16), jnp.float32)
        table, lens = jnp.zeros((rows, 3), jnp.int32), jnp.full(rows, 5, jnp.int32)
        arguments = q, pages, pages, table, lens, jnp.zeros(rows + 1, jnp.int32)
        plan = attention_plan(*arguments, implementation=implementation)
        out = ragged_paged_attention(*arguments, plan=plan, implementation=implementation)
        np.testing.assert_array_equal(out, np.zeros((tokens, 4, 16)))


# ---- a plan of other lengths: wrong numbers, but nothing else ----

OTHERS = {
    "longer": (Q_LENS, [720, 720, 720, 720, 720, 720, 720], 1),
    "shorter": ([0, 1, 2, 1, 0, 1, 0], [1, 2, 3, 1, 0, 1, 0], 2),
    "more queries": ([40, 0, 0, 0, 35, 0, 0], [44, 7, 0, 3, 720, 1, 1], 3),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("variant", ["plain", "three splits", "split tokens", "slid", "windows",
                                     "trees", "trees in windows"])  # fmt: skip
def test_a_plan_of_other_lengths_reads_and_writes_nothing_else(variant, other, implementation):
    """The emulator and the simulated device look at each access."""
    q_lens, seq_lens, seed = OTHERS[other]
    options = dict(VARIANTS[variant])
    planned = small_batch(q_lens=q_lens, seq_lens=seq_lens, seed=seed)
    changed = dict(options)
    for name in ("sliding_window", "num_pinned", "slot_offset"):
        if name in options:
            changed[name] = np.roll(options[name], 2)
    if "tree" in options:
        changed |= trees(seed, (9, 16, 0, 3, 0, 2, 16))
    for batch, mine, source, theirs in (
        (small_batch(), options, planned, changed),
        (planned, changed, small_batch(), options),
    ):
        plan = plan_of(*call_of(source, theirs, implementation=implementation))
        out, _ = attend_planned(batch, mine, plan, implementation=implementation)
        assert out.shape == batch.q.shape


# ---- what does not fit ----

WRONG = {
    "q=bfloat16[76, 8, 64], got q=bfloat16[74, 8, 64]": {"tokens": 2},
    "pages of dtype=bfloat16, got pages of dtype=float8_e4m3fn": {"kv": "float8_e4m3fn"},
    "page_table=[7, 90], got page_table=[7, 89]": {"columns": 1},
    "page_size=8, got page_size=16": {"page_size": 16},
    "num_kv_heads=2, got num_kv_heads=4": {"num_kv_heads": 4},
    "v_head_dim=64, got v_head_dim=128": {"v_head_dim": 128},
    "layout=HND, got layout=NHD": {"layout": "NHD"},
    "sliding_window=None, got sliding_window=one for all": {"sliding_window": np.int32(5)},
    "sliding_window=None, got sliding_window=one per row": {"sliding_window": WINDOWS},
    "num_pinned=False, got num_pinned=True": {"num_pinned": np.int32(1)},
    "alibi_slopes=False, got alibi_slopes=True": {"alibi_slopes": SLOPES},
    "max_tree=None, got max_tree=16": trees(0),
    "num_kv_splits=None, got num_kv_splits=2": {"num_kv_splits": 2},
    "split_tokens=None, got split_tokens=64": {"split_tokens": 64},
    "max_q_len=None, got max_q_len=1": {"max_q_len": 1},
    "implementation=None, got implementation=reference": {"implementation": "reference"},
    "rope=None, got rope=[4, 8]": {
        "rope": (np.ones((4, 8), np.float32), np.ones((4, 8), np.float32))
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_plan_of_other_facts_is_refused(message):
    change = dict(WRONG[message])
    case = {k: change.pop(k) for k in ("page_size", "num_kv_heads", "v_head_dim", "layout")
            if k in change}  # fmt: skip
    other = small_batch(**case)
    if change.pop("tokens", 0):
        other = dataclasses.replace(other, q=other.q[2:])
    if change.pop("columns", 0):
        other = dataclasses.replace(other, page_table=other.page_table[:, 1:])
    if kv := change.pop("kv", None):
        pages = {x: getattr(other, x).astype(jnp.dtype(kv)) for x in ("k_pages", "v_pages")}
        other = dataclasses.replace(other, **pages)
    plan = plan_of(*call_of(other, change))
    with pytest.raises(ValueError, match=re.escape(f"plan: expected one made with {message}")):
        attend_planned(small_batch(), {}, plan)


def test_what_is_no_plan_is_refused():
    arguments, call = call_of(small_batch(), {})
    with pytest.raises(ValueError, match=r"plan: expected .* AttentionPlan .* got a ArrayImpl"):
        ragged_paged_attention(*arguments, **call, plan=jnp.zeros(8, jnp.int32))
    plan = plan_of(arguments, call)
    cut = AttentionPlan(plan.words[:-4], plan.facts)
    with pytest.raises(ValueError, match=r"plan: expected words int32\[\d+\], got int32\[\d+\]"):
        ragged_paged_attention(*arguments, **call, plan=cut)


def test_rows_of_more_than_2_30_tokens_have_no_plan():
    pages = jax.ShapeDtypeStruct((1, 1, 2**20, 8), jnp.float32)
    table, lens = jnp.zeros((1, 2**10 + 1), jnp.int32), jnp.zeros(1, jnp.int32)
    q = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
    with pytest.raises(ValueError, match="page_table: expected at most 1073741824 tokens a row"):
        jax.eval_shape(lambda pages: attention_plan(q, pages, pages, table, lens), pages)


def test_a_device_with_some_of_the_heads_plans_for_those():
    shapes = (
        ("q", "bfloat16", (5, 8, 64)), ("k_pages", "bfloat16", (9, 4, 16, 64)),
        ("v_pages", "bfloat16", (9, 4, 16, 64)), ("alibi_slopes", "float32", (8,)),
    )  # fmt: skip
    own = jax.ShapeDtypeStruct((9, 1, 16, 64), jnp.bfloat16)  # one KV head of four
    operands = {"seq_lens": jnp.zeros(2, jnp.int32), "k_pages": own, "v_pages": own}
    told = _attributes((("layout", "HND"), ("split_tokens", 64)), shapes, operands)
    assert told == {
        "operands": "seq_lens",
        "layout": "HND",
        "split_tokens": 64,
        "shapes": "q bfloat16 5 2 64,k_pages bfloat16 9 1 16 64,v_pages bfloat16 9 1 16 64,"
        "alibi_slopes float32 2,out bfloat16 5 2 64,lse float32 5 2",
    }


# ---- transforms ----


def test_a_plan_goes_through_jit_vmap_and_grad(implementation):
    batch = small_batch("float32")
    arguments, call = call_of(batch, {}, implementation=implementation)

    def loss(q, k_pages, lens, planned):
        operands = (q, k_pages, batch.v_pages, arguments[3], lens, *arguments[5:])
        plan = plan_of(operands, call) if planned else None
        out, _ = ragged_paged_attention(*operands, **call, plan=plan)
        return jnp.sum(out**2)

    def both(q, k_pages, planned):
        return jax.value_and_grad(loss, (0, 1))(q, k_pages, arguments[4], planned)

    q, k_pages = jnp.nan_to_num(arguments[0]), jnp.nan_to_num(arguments[1])
    compiled = jax.jit(both, static_argnums=2)
    expected, got = (jax.tree.leaves(compiled(q, k_pages, planned)) for planned in (False, True))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    lens = jnp.stack([arguments[4], arguments[4] // 2])
    expected, got = (
        jax.vmap(lambda x, planned=planned: loss(q, k_pages, x, planned))(lens)
        for planned in (False, True)
    )
    np.testing.assert_array_equal(got, expected)
