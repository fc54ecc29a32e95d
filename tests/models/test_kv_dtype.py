# SPDX-License-Identifier: Apache-2.0
"""Models over 8-bit pages: near the f32 cache, and the same however the state is driven."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged.models import Decoder, evaluate, generate, token_logits
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.batch import generate_many
from jax_paged.models.testing import small_config

# Dense: a near router choice would turn another expert's way.
CONFIG = small_config("qwen3", vocab_size=64, head_dim=16, max_position_embeddings=64)
NAMES = ["fp8", "fp8_e5m2", "int8"]
TOKENS = np.random.default_rng(0).integers(0, 64, 40).tolist()


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.fixture(scope="module")
def exact(model):
    return token_logits(model, TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_an_f32_cache(model, exact, name):
    near = token_logits(model, TOKENS, kv_dtype=name)
    error = np.linalg.norm(near - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    limit = {"fp8": 0.05, "fp8_e5m2": 0.1, "int8": 0.01}[name]
    assert 0 < error.max() < limit


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_chunks_do_not_change_the_logits(model, name):
    whole = token_logits(model, TOKENS, kv_dtype=name)
    chunked = token_logits(model, TOKENS, kv_dtype=name, chunk=7)
    # One code may flip where a sum rounds differently.
    assert np.linalg.norm(whole - chunked) < 0.01 * np.linalg.norm(whole)


def test_perplexity_is_near_that_of_an_f32_cache(model):
    exact = evaluate(model, TOKENS)["nll"]
    assert evaluate(model, TOKENS, kv_dtype="int8")["nll"] == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("name", first_of(NAMES, 1))
def test_generate_makes_8_bit_pages_with_scales(model, name):
    prompts = [TOKENS[:5], TOKENS[5:20]]
    result = generate(model, prompts, max_new_tokens=6, kv_dtype=name)
    assert [len(new) for new in result.tokens] == [6, 6]
    state = result.state
    assert state.k_pages.dtype.itemsize == 1
    assert state.k_scale.shape == state.k_pages.shape[:-1]
    assert float(jnp.max(state.k_scale)) > 0
    assert bool(state.table.is_empty)
    # The last new token is drawn from logits over a cache of the same codes.
    again = generate(model, [p + new[:-1] for p, new in zip(prompts, result.tokens, strict=True)],
                     max_new_tokens=1, kv_dtype=name)  # fmt: skip
    assert [new[-1:] for new in result.tokens] == again.tokens


def test_bf16_pages_serve_f32_weights(model, exact):
    near = token_logits(model, TOKENS, kv_dtype="bfloat16")
    error = np.linalg.norm(near - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert 0 < error.max() < 0.02
    prompts = [TOKENS[:17], TOKENS[20:24]]
    result = generate(model, prompts, max_new_tokens=5, kv_dtype="bfloat16")
    assert result.state.k_pages.dtype == jnp.bfloat16
    many = generate_many(model, prompts, max_new_tokens=5, kv_dtype="bfloat16")
    again = generate(model, prompts, max_new_tokens=5, state=result.state)
    assert result.tokens == many.tokens == again.tokens


def test_a_state_with_given_scales_serves_too(model, exact):
    state = create_state(model, num_pages=8, max_seqs=2, pages_per_seq=4, kv_dtype="int8")
    fixed = jnp.full((CONFIG.num_layers, CONFIG.num_kv_heads), 1 / 16, jnp.float32)
    state = state.replace(k_scale=fixed, v_scale=fixed + 0)
    result = generate(model, [TOKENS[:9]], max_new_tokens=4, state=state)
    assert len(result.tokens[0]) == 4
    assert result.state.k_scale is not None
    np.testing.assert_array_equal(result.state.k_scale, np.float32(1 / 16))


@pytest.mark.deep
def test_the_engine_gives_the_tokens_of_generate(model):
    prompts = [TOKENS[:17], [*TOKENS[:17], 3], TOKENS[20:24]]  # two share a page
    many = generate_many(model, prompts, max_new_tokens=5, kv_dtype="fp8")
    one = [generate(model, [p], max_new_tokens=5, kv_dtype="fp8").tokens[0] for p in prompts]
    assert many.tokens == one


def test_wrong_names_are_named(model):
    with pytest.raises(ValueError, match=r"name: expected 'auto' or 'fp8' .*, got 'fp4'"):
        generate(model, [[1]], max_new_tokens=1, kv_dtype="fp4")
    message = "kv_dtype: expected 'auto', 'bfloat16' or the name of an 8-bit dtype, got 'fp16'"
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, [[1]], max_new_tokens=1, kv_dtype="fp16")
    state = create_state(model, num_pages=2, max_seqs=1, pages_per_seq=2)
    message = "kv_dtype: expected 'auto' with a state, which has its own, got fp8"
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(model, [[1]], max_new_tokens=1, state=state, kv_dtype="fp8")
