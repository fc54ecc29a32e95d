# SPDX-License-Identifier: Apache-2.0
"""The native ops on a GPU: against the float64 oracle, and what only a device can get wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits

from jax_paged import attention_plan, paged_attention, ragged_paged_attention, write_kv
from jax_paged.testing import (
    CASES,
    TOLERANCES,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)

pytestmark = pytest.mark.gpu

HEAD_DIMS = (40, 64, 80, 96, 112, 128, 192, 256, 512)  # 40 and 512 have no tensor-core kernel
SPLITS = ({}, {"num_kv_splits": 1}, {"num_kv_splits": 7}, {"split_tokens": 512})


def run(batch, implementation="native", **options):
    """(out, lse) of a batch through `ragged_paged_attention`."""
    arguments, defaults = batch.ragged()
    return ragged_paged_attention(
        *arguments, **(defaults | options), return_lse=True, implementation=implementation
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_mixed_batch_matches_float64_softmax(name, dtype):
    page = CASES[name].page_size
    q_lens, seq_lens = [1, 0, 150, 1, 3, page % 37, 1], [4000, page, 150, 0, page - 1, 2 * page, 1]
    batch = make_batch(CASES[name], dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 5)
    assert_attention_close(*run(batch), *dense_oracle(batch))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("q_lens", [[1] * 6, [1, 40, 0, 1, 3, 1]], ids=["decode", "mixed"])
def test_layers_that_share_a_plan_give_the_bits_of_layers_that_plan(q_lens, dtype):
    """Each reads what the one before wrote, so a launch that begins too early shows."""
    case = dataclasses.replace(CASES["qwen3_30b_a3b"], num_layers=2)
    batch = make_batch(case, dtype, q_lens, [900, 64, 7, 3000, 0, 129], num_tokens=sum(q_lens) + 2)
    q, *pages, table, seq_lens, cu_q_lens, num_seqs = batch.ragged()[0]
    pages = [jnp.nan_to_num(x) for x in pages]

    @functools.partial(jax.jit, static_argnums=0)
    def layers(shares, q, seq_lens):
        rows = (table, seq_lens, cu_q_lens, num_seqs)
        plan = attention_plan(q, *pages, *rows) if shares else None
        for layer in range(12):
            q = ragged_paged_attention(q, *pages, *rows, layer=jnp.int32(layer % 2), plan=plan)
        return q

    for lens in (seq_lens, seq_lens // 2, seq_lens, jnp.minimum(seq_lens, 70)):
        assert_same_bits([layers(True, q, lens)], [layers(False, q, lens)])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_decode_matches_float64_softmax(name, dtype):
    page = CASES[name].page_size
    batch = make_batch(CASES[name], dtype, [1] * 6, [5000, 3 * page, 1, page + 1, 0, page - 1])
    out, lse = paged_attention(
        *batch.operands(), layout=batch.case.layout, return_lse=True, implementation="native"
    )
    assert_attention_close(out, lse, *dense_oracle(batch))


@pytest.mark.parametrize("layout", ["HND", "NHD", "vllm5d"])
@pytest.mark.parametrize("page_size", [16, 48, 5, 1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_page_sizes_and_layouts_match(head_dim, page_size, layout):
    case = Case("sizes", 8, 2, head_dim, page_size=page_size, layout=layout, num_layers=3)
    batch = make_batch(case, jnp.bfloat16, [1, 40, 2, 1], [700, 75, 65, 33], seed=head_dim)
    assert_attention_close(*run(batch), *dense_oracle(batch))


@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_prompts_match(dtype, causal, layout):
    case = Case("prompts", 8, 2, 128, causal=causal, layout=layout)
    batch = make_batch(case, dtype, [1000, 129, 1, 64], [1000, 2000, 900, 300], seed=3)
    assert_attention_close(*run(batch), *dense_oracle(batch))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("layout", ["HND", "vllm5d"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_windows_soft_caps_slopes_and_sinks_match(dtype, layout, split):
    slopes = np.float32(2.0 ** -np.linspace(1, 8, 8))
    sinks = np.random.default_rng(5).standard_normal(8, "f4")
    for head_dim, causal in ((128, True), (256, True), (64, False)):
        case = Case("options", 8, 2, head_dim, layout=layout, causal=causal)
        batch = make_batch(case, dtype, [1, 300, 0, 1, 5], [3000, 900, 40, 0, 700], seed=head_dim)
        alone = ({"sliding_window": 400}, {"soft_cap": 3.0}, {"alibi_slopes": slopes})
        for options in (*alone, {"sinks": sinks}):
            assert_attention_close(*run(batch, **options, **split), *dense_oracle(batch, **options))
        options = {"sliding_window": 77, "soft_cap": 30.0, "alibi_slopes": slopes, "sinks": sinks}
        assert_attention_close(*run(batch, **options, **split), *dense_oracle(batch, **options))


@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 16, 17, 40])
def test_groups_and_splits_match(group, options):
    case = Case("group", 2 * group, 2, 128)
    batch = make_batch(case, jnp.float16, [1, 2, 1, 20, 0], [3000, 513, 16, 200, 9], seed=group)
    assert_attention_close(*run(batch, **options), *dense_oracle(batch))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_native_matches_the_reference_on_this_device(dtype):
    batch = make_batch(CASES["qwen3_30b_a3b"], dtype, [1, 30, 1], [1000, 60, 300], seed=6)
    (out, lse), (expected, expected_lse) = run(batch), run(batch, "reference")
    out, expected = (np.asarray(x).astype(np.float64) for x in (out, expected))
    error = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= 2 * TOLERANCES[dtype][0]  # each is within the tolerance of the truth
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-5)


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 5}, {"split_tokens": 64}], ids=str)
def test_a_hundred_runs_give_the_same_bits(options):
    rng = np.random.default_rng(0)
    lens = rng.integers(0, 3000, 24)
    batch = make_batch(CASES["qwen3_30b_a3b"], jnp.bfloat16, [1] * 24, lens)
    arguments, defaults = batch.ragged()
    first = run(batch, **options)
    assert_attention_close(*first, *dense_oracle(batch))
    for _ in range(100):
        again = ragged_paged_attention(
            *arguments, **defaults, **options, return_lse=True, implementation="native"
        )
        assert_same_bits(again, first)


def test_rows_with_wild_values_are_refused_and_the_others_stay_right():
    case = dataclasses.replace(CASES["llama3_8b"], num_layers=2)
    batch = make_batch(
        case, jnp.bfloat16, [1, 5, 1, 1, 1], [200, 50, 64, 7, 7], num_seqs=3, num_tokens=12
    )
    table = batch.page_table.copy()
    table[0, 3], table[1, 0] = 2**31 - 1, -(2**31)
    batch = dataclasses.replace(batch, page_table=table)
    assert_attention_close(*run(batch), *dense_oracle(batch))
    for layer in (-1, 2, 2**31 - 1):
        out, lse = run(batch, layer=jnp.int32(layer))
        np.testing.assert_array_equal(np.asarray(out).astype(np.float32), 0)
        assert np.isneginf(lse).all()


def test_a_program_of_many_calls_repeats_what_single_calls_give():
    # Ten custom calls in one program: XLA records them into a command buffer, and replays it with
    # other buffers, since the inputs differ from run to run.
    case = dataclasses.replace(CASES["qwen3_30b_a3b"], num_layers=4)
    arrays = [
        make_batch(case, jnp.bfloat16, [1] * 3, [900, 17, 400], seed=seed).operands()
        for seed in range(4)
    ]

    def step(q, k_pages, v_pages, table, lens, layer):
        return paged_attention(q, k_pages, v_pages, table, lens, layer=layer)

    @jax.jit
    def many(q, *rest):
        for layer in range(10):
            q = step(q, *rest, layer % 4)
        return q

    finite = [
        (q, *(jnp.nan_to_num(pages) for pages in pools), table, lens)
        for q, *pools, table, lens in arrays
    ]
    for _ in range(5):
        for q, *rest in finite:
            expected = q
            for layer in range(10):
                expected = step(expected, *rest, layer % 4)
            assert_same_bits([many(q, *rest)], [expected])


def test_a_loop_on_the_device_writes_and_reads_its_pages():
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((40, 3, 2, 64), "f4")) for _ in "kv")
    q = jnp.asarray(rng.standard_normal((40, 3, 8, 64), "f4"))
    table = jnp.asarray(rng.permutation(9).astype(np.int32).reshape(3, 3))

    def generate(implementation):
        def step(carry):
            token, k_pages, v_pages, out = carry
            slots = table[:, token // 16] * 16 + token % 16
            k_pages, v_pages = write_kv(
                k_pages, v_pages, k[token], v[token], slots, layer=1, implementation=implementation
            )
            lens = jnp.full(3, token + 1, jnp.int32)
            new = paged_attention(
                q[token], k_pages, v_pages, table, lens, layer=1, implementation=implementation
            )
            return token + 1, k_pages, v_pages, out.at[token].set(new)

        pool = jnp.full((2, 9, 2, 16, 64), jnp.nan, jnp.float32)
        start = (jnp.int32(0), pool, pool + 0, jnp.zeros_like(q))
        return jax.jit(
            lambda carry: jax.lax.while_loop(lambda c: c[0] < 40, step, carry), donate_argnums=0
        )(start)

    *_, out = generate("native")
    *_, expected = generate("reference")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_donated_pages_stay_where_they_are():
    pages = jnp.zeros((4, 50, 2, 16, 64), jnp.bfloat16)
    k_pages, v_pages = pages, pages + 0
    places = [x.unsafe_buffer_pointer() for x in (k_pages, v_pages)]
    new = jnp.ones((3, 2, 64), jnp.bfloat16)
    for layer in range(4):
        k_pages, v_pages = write_kv(
            k_pages, v_pages, new, new, jnp.array([1, -1, 799], jnp.int32), layer=layer
        )
    assert [x.unsafe_buffer_pointer() for x in (k_pages, v_pages)] == places
    assert float(k_pages.astype(jnp.float32).sum()) == 4 * 2 * 2 * 64


def test_many_rows_and_a_long_context_match():
    case = CASES["smollm2_135m"]
    lens = np.random.default_rng(2).integers(0, 200, 300)
    batch = make_batch(case, jnp.bfloat16, [1] * 300, lens, pages_per_seq=20)
    assert_attention_close(*run(batch), *dense_oracle(batch))
    batch = make_batch(case, jnp.bfloat16, [1, 1], [60_000, 44_444])
    assert_attention_close(*run(batch), *dense_oracle(batch))


def test_a_pool_beyond_32_bit_offsets_is_addressed_right():
    if jax.default_backend() != "gpu":
        pytest.skip("the pools take 10 GB")
    # The last of 32 layers holds the tokens: 2.5e9 elements, 5e9 bytes into the pool.
    batch = make_batch(Case("huge", 8, 4, 128), jnp.bfloat16, [1, 1], [300, 40], num_pages=10_000)

    @jax.jit
    def stack(pages):
        return jnp.zeros((32, *pages.shape), pages.dtype).at[31].set(jnp.nan_to_num(pages))

    q, k_pages, v_pages, *rest = batch.operands()
    k_pages, v_pages = stack(k_pages), stack(v_pages)
    assert 31 * (k_pages.size // 32) > 2**31
    out, lse = paged_attention(q, k_pages, v_pages, *rest, layer=31, return_lse=True)
    assert_attention_close(out, lse, *dense_oracle(batch))
    new = jnp.ones((1, 4, 128), jnp.bfloat16)
    slot = jnp.array([10_000 * 16 - 1], jnp.int32)
    k_pages, v_pages = write_kv(k_pages, v_pages, new, new, slot, layer=31)
    np.testing.assert_array_equal(np.asarray(v_pages[31, -1, :, -1]).astype(np.float32), 1)
