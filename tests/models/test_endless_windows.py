# SPDX-License-Identifier: Apache-2.0
"""Rows with windows that grow beyond the model's context: positions within the cache."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

import jax_paged as jp
from jax_paged.models.decoder.model import Decoder
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.evaluation.perplexity import evaluate
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import Stepper, noisy, small_config
from jax_paged.ops.rope import inverse_frequencies, rope_tables
from jax_paged.testing.stress.engine import (
    DRAFTS,
    SIZES,
    assert_empty,
    drive,
    random_requests,
    small_decoder,
)

CONTEXT, WINDOW, PINNED = 48, 24, 3
TEXT = np.random.default_rng(0).integers(0, 64, 300).tolist()


def make_model(num_layers, model_type="qwen3"):
    raw = {"vocab_size": 64, "max_position_embeddings": CONTEXT, "num_hidden_layers": num_layers}
    if model_type == "qwen3":
        raw["head_dim"] = 8
    config = small_config(model_type, **raw)
    return Decoder(config, random_source(config, seed=1))


def windowed(model, text, chunks, *, window=WINDOW, pinned=PINNED, page_size=4):
    """Logits of every token of a text, fed in chunks to a row with a window."""
    stepper = Stepper(model, max_seqs=1, pages_per_seq=24, page_size=page_size, windows=True)
    stepper.state, _ = stepper.state.reserve([0], 0)
    stepper.state, status = stepper.state.set_window([0], window, pinned)
    assert status.tolist() == [0]
    found, at = [], 0
    while at < len(text):
        size = min(chunks[len(found) % len(chunks)], len(text) - at)
        found.append(stepper.step({0: text[at : at + size]}, padded_to=max(chunks))[0])
        at += size
    return np.concatenate(found), stepper


@pytest.mark.parametrize("model_type", first_of(["qwen3", "deepseek_v2"], 1))
def test_a_token_of_one_layer_has_what_the_kept_tokens_alone_give(model_type):
    model = make_model(1, model_type)
    logits, stepper = windowed(model, TEXT, [1, 7, 16])
    assert int(stepper.state.table.pages_held[0]) < 16  # of 75 that the text fills
    for place in (0, 5, WINDOW - 1, WINDOW, WINDOW + 1, CONTEXT, CONTEXT + 1, 170, len(TEXT) - 1):
        kept = TEXT[: place + 1]
        if place >= WINDOW:
            kept = TEXT[:PINNED] + TEXT[place + 1 - (WINDOW - PINNED) : place + 1]
        alone = Stepper(model, max_seqs=1).step({0: kept})[0][-1]
        np.testing.assert_allclose(logits[place], alone, atol=2e-5, err_msg=str(place))


@pytest.mark.parametrize(
    ("pinned", "model_type"),
    first_of([(PINNED, "deepseek_v2"), (0, "qwen3"), (PINNED, "qwen3")], 1),
)
def test_what_a_token_gives_depends_neither_on_pages_nor_on_chunks(pinned, model_type):
    model = make_model(3, model_type)
    first, _ = windowed(model, TEXT, [1], pinned=pinned, page_size=4)
    for chunks, page_size in (([16], 8), ([5, 1, 11], 3)):
        other, _ = windowed(model, TEXT, chunks, pinned=pinned, page_size=page_size)
        np.testing.assert_allclose(other, first, atol=5e-5)
    plain = Stepper(model, max_seqs=1).step({0: TEXT[:WINDOW]})[0]
    np.testing.assert_allclose(first[:WINDOW], plain, atol=2e-5)


def test_a_window_beyond_the_context_keeps_its_limit():
    model = make_model(1)
    engine = Engine(model, num_pages=40, max_seqs=1, page_size=4, window=CONTEXT + 1)
    request = engine.submit(TEXT[:20], max_new_tokens=100)
    engine.run()
    assert (request.reason, len(request.tokens)) == ("length", CONTEXT - 20)
    with pytest.raises(ValueError, match=f"context: expected at most context_length={CONTEXT}"):
        evaluate(model, TEXT, context=100, window=CONTEXT + 1)


def test_an_engine_goes_on_and_on():
    model = make_model(2)
    engine = Engine(
        model, num_pages=40, max_seqs=2, page_size=4, max_tokens=8, window=WINDOW, num_pinned=PINNED
    )
    prompts = TEXT[:100], TEXT[100:109]  # the first is longer than the context
    requests = [engine.submit(prompt, max_new_tokens=150) for prompt in prompts]
    engine.run()
    engine.clear_cache()
    assert int(engine.state.table.num_free) == 40
    for prompt, request in zip(prompts, requests, strict=True):
        assert (request.reason, len(request.tokens)) == ("length", 150)
        logits, _ = windowed(model, [*prompt, *request.tokens], [16], page_size=8)
        assert request.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"preemption": "swap", "num_pages": 22, "max_drafts": 2, "swap_pages": 16},
            {"max_drafts": 3},
            {"max_drafts": 4, "draft_branches": 2},
            {"preemption": "swap", "num_pages": 22},
            {"num_pages": 22, "prefix_cache": False},
        ],
        1,
    ),
    ids=",".join,
)
def test_drafts_swapping_and_the_cache_change_no_token(options):
    model = make_model(2)
    same = {"max_seqs": 3, "page_size": 4, "window": WINDOW, "num_pinned": PINNED}
    begin = TEXT[:30]
    prompts = [[7, 9], begin[:9], TEXT[40:44], *(begin + TEXT[30 + 5 * i : 60] for i in range(3))]
    plain = Engine(model, num_pages=200, max_tokens=16, prefix_cache=False, **same)
    want = [plain.submit(prompt, max_new_tokens=70) for prompt in prompts]
    plain.run()
    engine = Engine(model, **({"num_pages": 60, "max_tokens": 16} | same | options))
    for _ in range(2):  # the second time from the cache
        requests = [engine.submit(prompt, max_new_tokens=70) for prompt in prompts]
        engine.run()
        assert [r.tokens for r in requests] == [r.tokens for r in want]
        found = sum(r.num_cached for r in requests)
    assert (found > 0) == options.get("prefix_cache", True)
    if "num_pages" in options:
        assert engine.num_preemptions > 0
    if "preemption" in options:
        assert min(engine.num_swaps) > 0
    if "max_drafts" in options:
        assert engine.num_accepted > 0
    engine.clear_cache()
    assert int(engine.state.table.num_free) == engine.state.table.num_pages
    assert engine._schedulers[0].num_free == engine.state.table.num_pages


def test_rows_with_windows_are_not_handed_out():
    options = {"num_pages": 40, "max_seqs": 1, "page_size": 4, "preemption": "swap"}
    engine = Engine(make_model(1), window=WINDOW, **options)
    with pytest.raises(ValueError, match="hand_out: expected an engine without a window"):
        engine.submit(TEXT[:9], max_new_tokens=3, hand_out=True)


@pytest.mark.parametrize("preemption", first_of(["swap", "recompute"], 1))
@pytest.mark.parametrize("drafts", first_of(["look-up", "none", "model trees"], 1))
def test_random_requests_get_the_tokens_of_their_window(drafts, preemption):
    model, window = small_decoder(), {"window": 10, "num_pinned": 3}
    options = {"preemption": preemption, **DRAFTS[drafts]}
    if "draft_model" in options:
        options["draft_model"] = noisy(model)
    engine = Engine(model, **SIZES, **window, **options)
    alone = Engine(
        model, num_pages=20, max_seqs=1, page_size=4, max_tokens=16, prefix_cache=False, **window
    )
    plan = list(random_requests(60, seed=len(drafts)))
    requests = drive(engine, plan)
    assert engine.num_preemptions > 0
    assert sum(request.num_cached for request in requests) > 0
    for request, new in zip(requests, plan, strict=True):
        want = alone.submit(new.prompt, max_new_tokens=new.new, **new.options)
        alone.run()
        assert request.tokens == want.tokens[: len(request.tokens)]
        assert request.reason == "cancelled" or len(request.tokens) == len(want.tokens)
    engine.clear_cache()
    assert_empty(engine)


def test_a_prompt_finds_what_a_row_has_kept_of_a_long_text():
    """Pages in the middle are not needed: they may be out of the cache already."""
    model = make_model(2)
    engine = Engine(
        model, num_pages=20, max_seqs=1, page_size=4, max_tokens=8, window=WINDOW, num_pinned=PINNED
    )
    first = engine.submit(TEXT[:200], max_new_tokens=8)
    engine.run()
    again = engine.submit(TEXT[:200], max_new_tokens=8)
    engine.run()
    assert (again.tokens, again.num_cached) == (first.tokens, 196)


def test_a_text_longer_than_the_context_is_one_piece():
    model = make_model(2)
    found = evaluate(model, TEXT, context=300, window=WINDOW, num_pinned=PINNED, chunk=32)
    logits, _ = windowed(model, TEXT, [16])
    logits = logits[:-1].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -logits[np.arange(len(TEXT) - 1), TEXT[1:]].mean()
    assert found["predicted"] == len(TEXT) - 1
    assert math.isclose(found["nll"], want, rel_tol=1e-5)


@pytest.mark.parametrize("theta", [100.0, 1e6])
@pytest.mark.parametrize("context", [48, 2048, 131072])
def test_angles_of_any_position_are_exact(theta, context):
    frequencies = inverse_frequencies(64, theta)
    rng = np.random.default_rng(0)
    positions = np.concatenate([
        [0, 1, context - 1, context, context + 1, 2**24 + 1, 2**31 - 1],
        rng.integers(0, 2**31, 50),
    ]).astype(np.int32)  # fmt: skip
    cos, sin = rope_tables(jnp.asarray(positions), frequencies, 1.5, context=context)
    turns = np.multiply.outer(positions.astype(np.longdouble), frequencies.astype(np.longdouble))
    # Up to a context an angle is a product of f32, and the rest is exact.
    bound = 1.5 * (context * 2.0**-23 + 2e-6)
    np.testing.assert_allclose(cos, 1.5 * np.cos(turns).astype("f8"), atol=bound)
    np.testing.assert_allclose(sin, 1.5 * np.sin(turns).astype("f8"), atol=bound)
    near = jnp.arange(context - 1, context - 40, -1, dtype=jnp.int32)
    for have, want in zip(
        rope_tables(near, frequencies, 1.5, context=context),
        rope_tables(near, frequencies, 1.5),
        strict=True,
    ):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtype", first_of(["float32", "bfloat16"], 1))
def test_the_parts_of_a_step_add_up_to_attention_in_the_cache(dtype):
    rows, dim, page_size, lens = 4, 8, 4, [9, 40, 3, 26]
    windows, pinned, new = [12, 12, 0, 20], [3, 5, 0, 0], [2, 1, 3, 4]
    state = jp.KVState.create(
        num_layers=1, num_pages=64, page_size=page_size, num_kv_heads=1, head_dim=dim,
        max_seqs=rows, pages_per_seq=16, dtype=dtype, windows=True,
    )  # fmt: skip
    rng, all_rows = np.random.default_rng(3), np.arange(rows, dtype=np.int32)
    frequencies = inverse_frequencies(dim, 100.0)
    state, _ = state.reserve(all_rows, 0)
    state, status = state.set_window(all_rows[[0, 1, 3]], [12, 12, 20], [3, 5, 0])
    assert status.tolist() == [0, 0, 0]
    known = [np.zeros((0, 2, dim)) for _ in range(rows)]  # K before RoPE, and V

    def feed(state, counts):
        state, batch, status = state.append(all_rows, counts, num_tokens=sum(counts))
        assert not np.any(status)
        qkv = jnp.asarray(rng.standard_normal((sum(counts), 4 * dim)), dtype)  # 2 heads of q
        window, apart, positions = jp.pinned_apart(batch)
        each = jnp.arange(sum(counts), dtype=jnp.int32)
        q, state = jp.write_qkv(
            qkv, state, batch, *rope_tables(batch.positions, frequencies, context=16), layer=0,
            num_q_heads=2, positions=each,
        )  # fmt: skip
        other, state = jp.write_qkv(
            qkv, state, apart, *rope_tables(positions, frequencies, context=16), layer=0,
            num_q_heads=2, positions=each,
        )  # fmt: skip
        parts = (
            jp.attend(x, state, y, layer=0, return_lse=True)
            for x, y in ((q, window), (other, apart))
        )
        out, _ = jp.merge_attention_states(*(x for part in parts for x in part))
        return state, np.asarray(qkv, "f8").reshape(-1, 4, dim), np.asarray(out, "f8")

    fed = [0] * rows
    while fed != lens:  # in steps of a few tokens, so that rows slide
        counts = [min(n, total - at) for n, total, at in zip(new, lens, fed, strict=True)]
        state, qkv, out = feed(state, counts)
        token = 0
        for row, count in enumerate(counts):
            known[row] = np.concatenate([known[row], qkv[token : token + count, 2:]])
            for i in range(count):
                place = fed[row] + i
                want = in_cache(
                    qkv[token + i, :2], known[row][: place + 1], windows[row], pinned[row],
                    frequencies,
                )  # fmt: skip
                atol = 1e-5 if dtype == "float32" else 5e-2
                np.testing.assert_allclose(out[token + i], want, atol=atol)
            token += count
        fed = [n + more for n, more in zip(fed, counts, strict=True)]
    assert np.asarray(state.table.windows.slot_offset)[1] > 0


def in_cache(q, kv, window, pinned, frequencies):
    """Float64 attention of one query to what a cache keeps, with the positions in the cache."""
    if window and len(kv) > window:
        kv = np.concatenate([kv[:pinned], kv[len(kv) - (window - pinned) :]])

    def turn(x, place):
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        c, s = np.cos(place * frequencies), np.sin(place * frequencies)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    keys = np.stack([turn(k, place) for place, k in enumerate(kv[:, 0])])
    logits = turn(q, len(kv) - 1) @ keys.T / math.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ kv[:, 1]
