# SPDX-License-Identifier: Apache-2.0
"""write, write_qkv and attend: the ops on arrays, with what state and batch know filled in."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged as jp
from jax_paged.layout import LAYOUTS
from jax_paged.ops.rope import inverse_frequencies, rope_tables

TOKENS, Q_HEADS, KV_HEADS, DIM = 6, 4, 2, 16
SIZES = {
    "num_layers": 2, "num_pages": 12, "page_size": 4, "num_kv_heads": KV_HEADS, "head_dim": DIM,
    "max_seqs": 3, "pages_per_seq": 4, "dtype": "float32",
}  # fmt: skip
PARENTS = [-1, 0, 0, -1, 0, jp.NO_TREE]  # rows of 3 and 2 nodes, and a token of padding


def values(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, "f4")


def grown(state, **options):
    """The state with two rows that have three tokens, and the batch of five tokens more."""
    if state.table.windows is not None and not state.table.row_window:
        state, _ = state.reserve([0, 2], 0)
        state, status = state.set_window([0, 2], [3, 4], [1, 0])
        assert status.tolist() == [0, 0]
    state, batch, status = state.append([0, 2], 3, num_tokens=TOKENS)
    assert status.tolist() == [0, 0]
    for layer in range(2):
        k, v = values(layer, 2, TOKENS, KV_HEADS, DIM)
        state = jp.write(k, v, state, batch, layer=layer)
    state, batch, status = state.append([0, 2], [3, 2], num_tokens=TOKENS, **options)
    assert status.tolist() == [0, 0]
    return state, batch


def by_hand(q, state, batch, **options):
    """Attention with all that `attend` takes from state and batch."""
    return jp.ragged_paged_attention(
        q, state.k_pages, state.v_pages, batch.page_table, batch.seq_lens, batch.cu_q_lens,
        batch.num_seqs, sliding_window=batch.sliding_window, num_pinned=batch.num_pinned,
        slot_offset=batch.slot_offset, tree=batch.tree, tree_sizes=batch.tree_sizes,
        k_scale=state.k_scale, v_scale=state.v_scale, layout=state.layout, **options,
    )  # fmt: skip


EIGHT_BIT = [
    {"dtype": "int8"},
    {"dtype": "float8_e4m3fn", "k_scale": [0.5, 0.25], "v_scale": [0.5, 2.0]},
]
STATES = [
    *({"layout": layout} for layout in LAYOUTS),
    *({"layout": layout} | options for layout in LAYOUTS for options in EIGHT_BIT),
    {"windows": True},
    {"windows": True, "layout": "NHD", "dtype": "int8"},
]


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_state_and_batch_tell_the_ops_what_they_know(options, trees):
    if trees and "windows" in options:
        options = options | {"windows": False}  # a tree must stand behind the pinned tokens
    state, batch = grown(
        jp.KVState.create(**SIZES | options), tree_parents=PARENTS if trees else None
    )
    k, v, q = (
        values(i, TOKENS, heads, DIM) for i, heads in enumerate((KV_HEADS,) * 2 + (Q_HEADS,))
    )
    copied = jax.tree.map(jnp.copy, state)
    pools = jp.write_kv(
        state.k_pages, state.v_pages, k, v, batch.slot_mapping, layer=1, layout=state.layout,
        k_scale=state.k_scale, v_scale=state.v_scale,
    )  # fmt: skip
    expected = copied.with_pages(0, *pools)
    written = jp.write(k, v, copied, batch, layer=1)
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    given = {"soft_cap": 20.0, "sinks": values(9, Q_HEADS), "return_lse": True}
    out = jp.attend(q, written, batch, layer=1, **given)
    for x, y in zip(out, by_hand(q, written, batch, layer=1, **given), strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.all(np.isfinite(out[0]))


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_a_plan_of_the_step_serves_its_layers(options, trees):
    if trees and "windows" in options:
        options = options | {"windows": False}
    state, batch = grown(
        jp.KVState.create(**SIZES | options), tree_parents=PARENTS if trees else None
    )
    q = values(0, TOKENS, Q_HEADS, DIM)
    plan = jp.attend_plan(jax.ShapeDtypeStruct(q.shape, q.dtype), state, batch, layer=0)
    for layer in range(2):
        got = jp.attend(q, state, batch, layer=layer, plan=plan)
        np.testing.assert_array_equal(got, jp.attend(q, state, batch, layer=layer))


def test_a_plan_is_for_the_options_that_it_was_made_with():
    state, batch = grown(jp.KVState.create(**SIZES))
    q = values(0, TOKENS, Q_HEADS, DIM)
    options = {
        "sliding_window": 3,
        "split_tokens": 64,
        "alibi_slopes": jnp.ones(Q_HEADS, jnp.float32),
    }
    plan = jp.attend_plan(q, state, batch, layer=0, **options)
    out = jp.attend(q, state, batch, layer=1, plan=plan, **options)
    np.testing.assert_array_equal(out, jp.attend(q, state, batch, layer=1, **options))
    for name in options:
        others = {key: x for key, x in options.items() if key != name}
        with pytest.raises(ValueError, match=f"^plan: expected one made with {name}=(None|False)"):
            jp.attend(q, state, batch, layer=1, plan=plan, **others)


def test_a_step_of_an_int_knows_how_many_tokens_a_row_has():
    state = jp.KVState.create(**SIZES)
    state, batch, _ = state.append([0, 1], 2, num_tokens=4)
    assert batch.max_q_len == 2
    for q_lens in ([1, 1], jnp.ones(2, jnp.int32)):
        assert state.append([0, 1], q_lens)[1].max_q_len is None
    _, batch, _ = jax.jit(lambda state: state.append([0, 1], 1))(state)
    assert batch.max_q_len == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "int8"}, {"dtype": "int8", "layout": "vllm5d"}, {"layout": "NHD"}],
    ids=str,
)
@pytest.mark.parametrize("per_token", [False, True])
def test_write_qkv_is_the_op_with_the_batch_of_the_step(options, per_token):
    state, batch = grown(jp.KVState.create(**SIZES | options))
    qkv = values(5, TOKENS, (Q_HEADS + 2 * KV_HEADS) * DIM)
    positions = batch.positions if per_token else jnp.arange(16)
    cos, sin = rope_tables(positions, inverse_frequencies(DIM, 1e4))
    row = jnp.arange(TOKENS) if per_token else None
    norms = {"q_norm": values(6, DIM), "k_norm": values(7, DIM), "num_q_heads": Q_HEADS}
    copied = jax.tree.map(jnp.copy, state)
    q, *pools = jp.qkv_norm_rope_write(
        qkv, state.k_pages, state.v_pages, row if per_token else batch.positions,
        batch.slot_mapping, cos, sin, layer=1, layout=state.layout, k_scale=state.k_scale,
        v_scale=state.v_scale, **norms,
    )  # fmt: skip
    expected = q, copied.with_pages(0, *pools)
    got = jp.write_qkv(qkv, copied, batch, cos, sin, layer=1, positions=row, **norms)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_range_of_layers_is_numbered_as_in_the_model():
    state = jp.KVState.create(**SIZES, layer_begin=5)
    state, batch, _ = state.append([1], 1)
    k, v = values(0, 2, 1, KV_HEADS, DIM)
    for layer in (6, jnp.int32(6)):
        written = jp.write(k, v, jax.tree.map(jnp.copy, state), batch, layer=layer)
        assert not np.any(written.k_pages[0])
        assert np.any(written.k_pages[1])
    with pytest.raises(ValueError, match=r"^layer: expected one of range\(5, 7\), got 1$"):
        jp.write(k, v, state, batch, layer=1)


LATENT = {name: x for name, x in SIZES.items() if name not in ("num_layers", "head_dim")}
GROUPS = LATENT | {"layer_kinds": ["full", "mla", 8], "head_dim": DIM, "latent_dim": 24}


def test_latent_rows_go_the_same_way():
    state = jp.KVState.create(**GROUPS | {"dtype": "int8", "kv_scale": 0.1})
    state, batch, _ = state.append([0, 1], [1, 2], num_tokens=3)
    kv, q = values(0, 3, 24), values(1, 3, Q_HEADS, 24)
    group, own = state.groups[1], batch.groups[1]
    kv_pages = jp.write_mla_kv(
        jnp.copy(group.k_pages), kv, own.slot_mapping, layer=0, kv_scale=group.k_scale
    )
    state = jp.write(kv, None, state, batch, layer=1)
    np.testing.assert_array_equal(state.groups[1].k_pages, kv_pages)
    options = {"sm_scale": 0.3, "v_head_dim": 16}
    assert jp.attend_plan(q, state, batch, layer=1) is None
    expected = jp.mla_paged_attention(
        q, kv_pages, own.page_table, own.seq_lens, own.cu_q_lens, own.num_seqs, layer=0,
        kv_scale=group.k_scale, **options,
    )  # fmt: skip
    np.testing.assert_array_equal(jp.attend(q, state, batch, layer=1, **options), expected)


def test_what_is_not_the_layers_is_named():
    state = jp.KVState.create(**GROUPS)
    state, batch, _ = state.append([0], 1)
    k, q, latent = values(0, 1, KV_HEADS, DIM), values(1, 1, Q_HEADS, DIM), values(2, 1, 24)
    one, other, _ = jp.KVState.create(**SIZES).append([0], 1)
    longer = jp.KVState.create(**SIZES | {"pages_per_seq": 5})
    windows = jp.KVState.create(**SIZES | {"windows": True})
    windows, of_windows, _ = windows.append([0], 1)
    attend = functools.partial(jp.attend, q)
    of_latent = {"layer": 1, "sm_scale": 0.3, "v_head_dim": 16}
    cases = [
        (lambda: jp.write(k, k, state, other, layer=0), "batch: expected one of 3 groups of la"),
        (lambda: jp.write(k, k, longer, other, layer=0),
         "batch: expected one of this state, with pages_per_seq=5 and windows=False, got "
         "pages_per_seq=4 and windows=False"),
        (lambda: jp.write(k, k, windows, other, layer=0), "batch: expected one of this state, wi"),
        (lambda: attend(one, of_windows, layer=0), "batch: expected one of this state, with pag"),
        (lambda: attend(windows, of_windows, layer=0, sliding_window=3),
         "sliding_window: expected None where the rows of the state have windows, got a window"),
        (lambda: attend(state, batch, layer=jnp.int32(0)), "layer: expected an int for a state"),
        (lambda: attend(state, batch, layer=3), "layer: expected one of range(0, 3), got 3"),
        (lambda: attend(one, other, layer=0, v_head_dim=8),
         "v_head_dim: expected None for a layer with K and V, got 8"),
        (lambda: jp.write(k, None, one, other, layer=0),
         "v: expected an array for a layer with K and V, got None"),
        (lambda: jp.write(latent, k, state, batch, layer=1),
         "v: expected None for a layer of latent rows, got a"),
        (lambda: jp.attend(latent[:, None], state, batch, **of_latent, rope=(k, k, "half")),
         "rope: expected None for a layer of latent rows, got a value"),
        (lambda: jp.attend(latent[:, None], state, batch, layer=1, v_head_dim=16),
         "sm_scale: expected a number for a layer of latent rows, got None"),
        (lambda: jp.attend(latent[:, None], state, batch, layer=1, sm_scale=0.3),
         "v_head_dim: expected an int for a layer of latent rows, got None"),
        (lambda: jp.write_qkv(latent, state, batch, k, k, layer=1, num_q_heads=1),
         "layer: expected one with K and V, got one of latent rows"),
        (lambda: attend(one.table, other, layer=0), "state: expected a KVState, got a PageTable"),
        (lambda: attend(one, other.page_table, layer=0), "batch: expected the StepBatch of sta"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()


def test_in_a_jit_that_donates_the_state_nothing_is_copied():
    state = jax.eval_shape(lambda: jp.KVState.create(**SIZES | {"num_pages": 512}))

    def step(state, q, k, v):
        state, batch, status = state.append([0, 1], 1)
        for layer in range(2):
            state = jp.write(k, v, state, batch, layer=layer)
            q = jp.attend(q, state, batch, layer=layer)
            k, v = k + q[:, :2], v - q[:, :2]  # what is written depends on what was read before
        return state, q, status

    shapes = (jax.ShapeDtypeStruct((2, heads, DIM), "float32") for heads in (4, 2, 2))
    compiled = jax.jit(step, donate_argnums=0).lower(state, *shapes).compile()
    assert jp.testing.is_in_place(compiled, state.k_pages)
