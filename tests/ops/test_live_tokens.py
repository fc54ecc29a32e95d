# SPDX-License-Identifier: Apache-2.0
"""Tokens of `linear` that do not count: 0, and no other token's bits depend on them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_paged import linear, pack_weight, quantize_int4, quantize_weight
from jax_paged.models import Decoder, create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
from jax_paged.ops.linear import TARGET
from jax_paged.testing.projections import quantize_blocks

DEPTH, OUTPUTS = 256, 48
KINDS = ["plain", "int8", "float8_e4m3fn", "blocks", "packed", "packed int8", "int4"]


def made(kind: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """A weight and the options that go with it."""
    weight = np.random.default_rng(0).standard_normal((OUTPUTS, DEPTH)).astype("f4")
    if kind == "int4":
        return quantize_int4(jnp.asarray(weight)), {}
    if kind == "blocks":
        codes, scale, _ = quantize_blocks(weight, jnp.int8)
        return codes, {"weight_scale": scale}
    if kind in ("plain", "packed"):
        plain = jnp.asarray(weight, dtype)
        return (pack_weight(plain) if kind == "packed" else plain), {}
    codes, scale = quantize_weight(jnp.asarray(weight), dtype=kind.removeprefix("packed "))
    return (pack_weight(codes) if "packed" in kind else codes), {"weight_scale": scale}


def masks(rows: int) -> dict[str, np.ndarray]:
    number = np.arange(rows)
    return {
        "all": number >= 0, "none": number < 0, "one": number < 1, "some": number < rows // 3,
        "holes": number % 3 == 1, "the last": number == rows - 1,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_live_tokens_keep_their_bits_and_the_others_are_0(kind, dtype, implementation):
    weight, options = made(kind, dtype)
    options["implementation"] = implementation
    for rows in (1, 8, 20, 70, 130):
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, DEPTH)), dtype)
        whole = np.asarray(linear(x, weight, **options), "f4")
        for live in masks(rows).values():
            stale = jnp.where(live[:, None], x, jnp.nan)
            out = linear(stale, weight, live=jnp.asarray(live), **options)
            np.testing.assert_array_equal(np.asarray(out, "f4")[live], whole[live])
            np.testing.assert_array_equal(np.asarray(out, "f4")[~live], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_gradients(kind):
    weight, options = made(kind, "float32")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, DEPTH)), jnp.float32)
    live = jnp.asarray([[True, False, True, True, False], [False, True, True, False, False]])

    def of(x, live):
        return linear(x, weight, live=live, **options)

    each = np.stack([of(x[i], live[i]) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(of)(x, live), each)
    shared = np.stack([of(x[i], live[0]) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(of, (0, None))(x, live[0]), shared)
    gradient = jax.grad(lambda x: of(x, live[0]).sum())(x[0])
    whole = jax.grad(lambda x: linear(x, weight, **options).sum())(x[0])
    np.testing.assert_array_equal(gradient, jnp.where(live[0][:, None], whole, 0))


def test_gradients_of_a_weight_are_of_live_tokens_alone():
    weight, _ = made("plain", "float32")
    x, live = jnp.ones((5, DEPTH), jnp.float32), jnp.arange(5) < 2
    gradient = jax.grad(lambda weight: linear(x, weight, live=live).sum())(weight)
    np.testing.assert_array_equal(gradient, np.full_like(weight, 2))


def test_wrong_masks_are_named():
    weight, _ = made("plain", "float32")
    x = jnp.ones((5, DEPTH), jnp.float32)
    with pytest.raises(ValueError, match=r"^live: expected shape \[tokens=5\], got \[4\]"):
        linear(x, weight, live=jnp.ones(4, bool))
    with pytest.raises(ValueError, match=r"^live: expected dtype bool, got int32"):
        linear(x, weight, live=jnp.ones(5, jnp.int32))
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((5, OUTPUTS), jnp.float32))
    none = jnp.zeros(0, jnp.float32)
    for mask in (jnp.ones(4, bool), jnp.ones((5, 1), bool), jnp.ones((0, 1), bool)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"live expected shape \[5\]"):
            jax.block_until_ready(call(x, weight, none, mask))


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_model_tells_its_projections_which_tokens_are_padding(model_type):
    """And the head which of its rows are asked for."""
    config = small_config(model_type)
    graph, params = nnx.split(Decoder(config, random_source(config, seed=0)))
    state = create_state(nnx.merge(graph, params), num_pages=8, max_seqs=2, pages_per_seq=4)
    state, _ = state.reserve(np.arange(2, dtype=np.int32), np.int32([3, 4]))

    def step(params, state):
        rows = jnp.arange(2, dtype=jnp.int32)
        state, batch, _ = state.step(rows, jnp.int32([3, 4]), num_tokens=24)
        tokens, wanted = jnp.zeros(24, jnp.int32), batch.cu_q_lens[1:] - 1
        return nnx.merge(graph, params)(tokens, batch, state, logit_rows=wanted)

    text = jax.jit(step).lower(params, state).as_text()
    calls = re.findall(rf"@{re.escape(TARGET)}\(.*", text)
    assert len(calls) > 3
    masks = [re.findall(r"tensor<(\d+)xi1>", call) for call in calls]
    assert masks.count(["2"]) == 1
    assert masks.count(["24"]) == len(calls) - 1
