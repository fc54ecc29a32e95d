# SPDX-License-Identifier: Apache-2.0
"""KVState of several groups: pools and a page table for each kind, changed all or none."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import copies_and_selects, gathers_in_place
from kv_groups import assert_holds, write_values
from page_tables import assert_same
from tiers import first_of

from jax_paged import (
    NO_TREE,
    KVState,
    PageTable,
    Status,
    attend,
    pages_for,
    write,
)

OK, POOL_FULL, ROW_FULL = Status.OK, Status.POOL_FULL, Status.ROW_FULL
SLID_OUT, STALE_ROW = Status.SLID_OUT, Status.STALE_ROW
WINDOW, PAGE_SIZE, ROWS = 6, 4, 6
KINDS = ("full", WINDOW, "mla", WINDOW)
SIZES = {
    "layer_kinds": KINDS,
    "num_pages": {"full": 40, WINDOW: 12, "mla": 40},
    "pages_per_seq": {"full": 16, WINDOW: 6, "mla": 16},
    "page_size": PAGE_SIZE,
    "max_seqs": ROWS,
    "num_kv_heads": 2,
    "head_dim": 8,
    "latent_dim": 16,
    "dtype": "float32",
    "max_tree": 6,
}


def jitted(verb):
    """A verb as a program that donates nothing, for lists of up to four numbers."""
    program = jax.jit(verb)

    def call(kv, *numbers):
        kv, status = program(kv, *(np.asarray([*x, *[-1] * (4 - len(x))]) for x in numbers))
        return kv, status[: len(numbers[0])]

    return call


_reserve, _fork, _truncate, _commit, _release = map(
    jitted, (KVState.reserve, KVState.fork, KVState.truncate, KVState.commit_tree, KVState.release)
)


def make(**changes) -> KVState:
    return KVState.create(**(SIZES | changes))


@functools.partial(jax.jit, donate_argnums=0)
def _append(kv, rows, q_lens, values, parents=None):
    kv, reserved = kv.reserve(rows, q_lens)
    kv, batch, stepped = kv.step(rows, q_lens, num_tokens=values.shape[0], tree_parents=parents)
    return write_values(kv, batch, values), jnp.stack([reserved, stepped])


def append(kv: KVState, rows, q_lens, values, parents=None) -> KVState:
    """Always the same shapes, since each shape compiles anew."""
    rows, q_lens = ([*x, *[-1] * (3 - len(x))] for x in (rows, q_lens))
    values = jnp.asarray([*values, *[0] * (16 - len(values))], jnp.float32)
    if parents is not None:
        parents = jnp.asarray([*parents, *[NO_TREE] * (16 - len(parents))], jnp.int32)
    kv, status = _append(kv, jnp.asarray(rows), jnp.asarray(q_lens), values, parents)
    assert not np.asarray(status).any(), status
    return kv


def tables(kv: KVState) -> list[PageTable]:
    return [group.table for group in kv.groups]


def test_layers_of_one_kind_share_pools_and_a_table():
    kv = make(layer_begin=3)
    full, window, latent = kv.groups
    assert kv.kinds == ("full", WINDOW, "mla")
    assert [group.is_latent for group in kv.groups] == [False, False, True]
    assert full.k_pages.shape == (1, 40, 2, PAGE_SIZE, 8)
    assert window.v_pages.shape == (2, 12, 2, PAGE_SIZE, 8)
    assert latent.k_pages.shape == (1, 40, PAGE_SIZE, 16)
    assert [table.pages_per_seq for table in tables(kv)] == [16, 6, 16]
    assert [kv.find(layer) for layer in range(3, 7)] == [(0, 0), (1, 0), (2, 0), (1, 1)]
    with pytest.raises(ValueError, match=r"^layer: expected one of range\(3, 7\), got 2$"):
        kv.find(2)


def test_a_state_round_trips_as_a_pytree_of_separate_buffers():
    kv = make(layer_begin=3)
    again = jax.tree.map(lambda leaf: leaf, kv)
    assert (again.layer_kinds, again.layer_begin) == (KINDS, 3)
    assert jax.tree.structure(again) != jax.tree.structure(make())
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kv)]
    assert len(set(pointers)) == len(pointers)


def test_eight_bit_pools_have_scales():
    kv = make(dtype="int8", kv_scale=0.25)
    full, _, latent = kv.groups
    assert full.k_scale.shape == (1, 40, 2, PAGE_SIZE)
    assert float(latent.k_scale) == 0.25
    given = make(dtype="int8", k_scale=0.5, v_scale=2.0).groups
    assert [float(group.v_scale) for group in given[:2]] == [2.0, 2.0]
    assert given[2].k_scale is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_kinds": []}, "layer_kinds: expected at least one layer, got []"),
        ({"layer_kinds": ["half"]},
         "layer_kinds: expected each 'full', 'mla' or an int of at least 1, got 'half'"),
        ({"layer_kinds": [0]},
         "layer_kinds: expected each 'full', 'mla' or an int of at least 1, got 0"),
        ({"layer_kinds": [True]},
         "layer_kinds: expected each 'full', 'mla' or an int of at least 1, got True"),
        ({"num_pages": {"full": 4}},
         "num_pages: expected a size for each of ['full', 6, 'mla'], got ['full']"),
        ({"pages_per_seq": 0}, "pages_per_seq: expected an integer of at least 1, got 0"),
        ({"layer_begin": -1}, "layer_begin: expected an integer of at least 0, got -1"),
        ({"num_kv_heads": None}, "num_kv_heads: expected an integer of at least 1, got None"),
        ({"latent_dim": None}, "latent_dim: expected an integer of at least 1, got None"),
        ({"layer_kinds": ["mla"], "num_pages": 4, "pages_per_seq": 2, "dtype": "int16"},
         "dtype: expected bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2 or int8, "
         "got int16"),
        ({"kv_scale": 0.5}, "kv_scale: expected None for pages of float32, got a scale"),
    ],
)  # fmt: skip
def test_create_names_a_wrong_argument(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**change)


def test_rows_fork_slide_and_part_in_every_group():
    texts = {0: [float(i) for i in range(23)]}
    kv = make()
    for begin in range(0, 23, 7):
        part = texts[0][begin : begin + 7]
        kv = append(kv, [0], [len(part)], part)
    assert_holds(kv, 0, texts[0])
    kv, status = _fork(kv, [0, 0, -1], [1, 3, 2], [23, 22, 5])
    assert status.tolist() == [OK] * 3
    texts |= {1: texts[0][:], 3: texts[0][:22]}
    for step in range(12):  # slides over the pages that they shared
        values = [100.0 + 10 * row + step for row in (0, 1, 3)]
        kv = append(kv, [0, 1, 3], [1, 1, 1], values)
        for row, value in zip((0, 1, 3), values, strict=True):
            texts[row].append(value)
            assert_holds(kv, row, texts[row])
    kv, status = _truncate(kv, [3, 0], [1, 0])
    assert status.tolist() == [OK, OK]
    kv = append(kv, [3, 0], [1, 1], [7.0, 8.0])
    assert_holds(kv, 3, [*texts[3][:-1], 7.0])
    assert_holds(kv, 0, [*texts[0], 8.0])
    kv, status = _release(kv, [0, 1, 3])
    assert status.tolist() == [OK] * 3
    assert kv.free_pages.tolist() == [40, 12, 40]
    assert all(bool(table.is_empty) for table in tables(kv))


def test_a_row_cannot_be_forked_where_its_window_is_gone():
    kv = make()
    for begin in range(0, 24, 6):
        kv = append(kv, [0], [6], range(begin, begin + 6))
    begin = int(kv.groups[1].table.windows.slot_offset[0])
    assert begin == 12  # of 24 tokens; the last reserve kept what token 18 sees
    before, shortest = kv, begin + WINDOW - 1
    kv, status = _fork(kv, [0, 0], [1, 2], [shortest - 1, 24])
    assert status.tolist() == [SLID_OUT, OK]
    assert_same(tables(kv), tables(before))
    _, status = _fork(kv, [0, 3, 0, 0], [1, 2, 4, -1], [25, 0, -1, shortest - 1])
    assert status.tolist() == [Status.BAD_ROW, STALE_ROW, Status.BAD_ROW, OK]
    kv, status = _fork(kv, [0], [1], [shortest])
    assert status.tolist() == [OK]
    kv = append(kv, [1], [2], [50, 51])
    assert_holds(kv, 1, [*range(shortest), 50, 51])
    assert_holds(kv, 0, list(range(24)))


@pytest.mark.parametrize(
    "kinds",
    [
        ("full", WINDOW, "mla"),
        pytest.param(("full", WINDOW, WINDOW), marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_a_path_of_a_tree_is_kept_in_every_group(kinds):
    kv = append(make(layer_kinds=kinds), [1], [5], range(5))
    kv = append(kv, [1], [6], range(5, 11))
    kv = append(kv, [1], [5], [20, 21, 22, 23, 24], [-1, 0, 0, 2, 3])
    kv, status = _commit(kv, [1], [4])
    assert status.tolist() == [OK]
    assert_holds(kv, 1, [*range(11), 20, 22, 23, 24])
    _, status = _commit(kv, [1], [4])
    assert status.tolist() == [Status.BAD_ROW]


@pytest.mark.parametrize(
    ("group", "taken", "counts", "expected"),
    [
        (0, 36, [4, 9, 1], [OK, POOL_FULL, POOL_FULL]),
        (1, 8, [4, 9, 0], [OK, POOL_FULL, OK]),
        (2, 35, [4, 9, 9], [OK, OK, POOL_FULL]),
        # Row 1 is too long for the table of group 1, row 2 finds no pages in group 2.
        (2, 32, [4, 25, 5], [OK, ROW_FULL, POOL_FULL]),
    ],
)
def test_what_fails_in_one_group_changes_none(group, taken, counts, expected):
    kv = append(make(), [0], [4], range(4))
    fuller = kv.groups[group].table  # by a row that no other group knows
    rows, width = [5, 4, 3], fuller.pages_per_seq
    numbers = [min(width, max(0, taken - i * width)) * PAGE_SIZE for i in range(3)]
    fuller, status = fuller.reserve(rows, numbers)
    assert status.tolist() == [OK] * 3
    new = list(kv.groups)
    new[group] = dataclasses.replace(new[group], table=fuller)
    kv = dataclasses.replace(kv, groups=tuple(new))
    after, status = _reserve(kv, [0, 1, 2], counts)
    assert status.tolist() == expected
    assert_same(after, kv)


def test_a_step_that_one_group_refuses_is_padding_in_all():
    kv = append(make(), [0], [4], range(4))
    table, status = kv.groups[0].table.reserve([0], 4)  # the others have no room
    kv = dataclasses.replace(
        kv, groups=(dataclasses.replace(kv.groups[0], table=table), *kv.groups[1:])
    )
    after, of_all, status = kv.step([0, 1], [1, 0], num_tokens=3)
    assert status.tolist() == [ROW_FULL, STALE_ROW]
    assert_same(after, kv)
    for batch in of_all.groups:
        assert batch.num_seqs.tolist() == [0]
        assert batch.slot_mapping.tolist() == [-1] * 3
        assert batch.seq_lens.tolist() == [0, 0]


def test_reset_frees_all_rows_and_their_windows():
    kv = (append(make(), [0, 2], [4, 9], range(13))).reset()
    assert kv.free_pages.tolist() == [40, 12, 40]
    assert kv.peak_pages.tolist() == [0, 0, 0]
    assert not np.asarray(kv.groups[1].table.windows.window).any()


def dense(q, k, v, window, scale):
    """Softmax attention of the last len(q) tokens over k and v in float64, one head each."""
    p = np.arange(len(k))
    query = p[len(k) - len(q) :, None]
    seen = (p[None] <= query) & (p[None] > query - window)
    logits = np.where(seen, np.einsum("qd,kd->qk", q, k, dtype=np.float64) * scale, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("implementation", first_of(["native", "reference"], 1))
def test_rows_far_longer_than_the_pool_of_a_window_attend_as_densely(implementation):
    window, chunk, length, rows = 11, 5, 100, (0, 2)
    per_row = pages_for(window + chunk, PAGE_SIZE) + 1
    kv = make(
        layer_kinds=(window, "full", "mla"),
        num_pages={window: 2 * per_row, "full": 50, "mla": 50},
        pages_per_seq={window: per_row, "full": 25, "mla": 25},
        num_kv_heads=1,
    )
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal((2, len(rows), length, 8)).astype("f4") for _ in range(3))
    latent, latent_q = (rng.standard_normal((len(rows), length, 16)).astype("f4") for _ in "kq")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(kv, q_lens, q, k, v, latent_q, latent):
        ids = jnp.asarray(rows, jnp.int32)
        kv, batch, status = kv.append(ids, q_lens, num_tokens=q.shape[1])
        outs, options = [], {"implementation": implementation}
        for layer in range(3):
            if kv.layer_kinds[layer] == "mla":
                kv = write(latent, None, kv, batch, layer=layer)
                out = attend(
                    latent_q[:, None], kv, batch, layer=layer, sm_scale=0.25, v_head_dim=8,
                    **options,
                )  # fmt: skip
            else:
                new = k[layer][:, None], v[layer][:, None]
                kv = write(*new, kv, batch, layer=layer, **options)
                out = attend(q[layer][:, None], kv, batch, layer=layer, sm_scale=0.25, **options)
            outs.append(out[:, 0])
        return kv, jnp.stack(outs), status

    done, got = np.zeros(2, int), [[], []]
    while done[1] < length:
        # Row 0 takes chunks and then rests, row 1 comes in ones and twos.
        counts = np.minimum([chunk, 1 + done[1] % 2], length - done)
        parts = [slice(d, d + c) for d, c in zip(done, counts, strict=True)]

        def flat(x, parts=parts, counts=counts):
            both = np.concatenate([x[..., row, part, :] for row, part in enumerate(parts)], -2)
            return np.pad(both, [(0, 0)] * (x.ndim - 3) + [(0, chunk + 2 - counts.sum()), (0, 0)])

        kv, out, status = step(kv, counts, *map(flat, (q, k, v, latent_q, latent)))
        assert not np.asarray(status).any()
        for row, end in enumerate(np.cumsum(counts)):
            got[row].append(np.asarray(out)[:, end - counts[row] : end])
        done += counts
    assert kv.peak_pages.tolist() == [2 * per_row - 1, 50, 50]
    for row in range(2):
        found = np.concatenate(got[row], 1)
        for layer, seen in enumerate((window, length)):
            wanted = dense(q[layer, row], k[layer, row], v[layer, row], seen, 0.25)
            np.testing.assert_allclose(found[layer], wanted, atol=1e-4)
        wanted = dense(latent_q[row], latent[row], latent[row, :, :8], length, 0.25)
        np.testing.assert_allclose(found[2], wanted, atol=1e-4)


@pytest.mark.parametrize(
    "verb",
    [
        *("reserve", "step", "fork", "truncate"),
        pytest.param("commit_tree", marks=gathers_in_place),
    ],
)
def test_no_verb_copies_a_pool_or_selects_between_pools(verb):
    sizes = {"num_pages": 256, "page_size": 16, "num_kv_heads": 2, "head_dim": 32}
    kv = jax.eval_shape(lambda: make(**sizes, latent_dim=64))
    rows = jnp.zeros(2, jnp.int32)
    count = 3 if verb == "fork" else 2
    compiled = (
        jax.jit(getattr(KVState, verb), donate_argnums=0).lower(kv, *[rows] * count).compile()
    )
    smallest = kv.groups[2].k_pages
    assert copies_and_selects(compiled, smallest) == []
    pools = [pool for group in kv.groups for pool in jax.tree.leaves(group) if pool.ndim > 3]
    assert len(pools) == 5
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(4 * pool.size for pool in pools)
    assert memory.temp_size_in_bytes < 4 * smallest.size // 2
