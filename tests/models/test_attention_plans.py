# SPDX-License-Identifier: Apache-2.0
"""A step of a model plans its attention once for all layers that are alike: counted in StableHLO.

The programs are lowered for CUDA, which needs no CUDA kernels. What XLA:GPU makes of them is asked
in tests/kernels/test_gpu_aot.py.
"""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_paged import KVState
from jax_paged.models.decoder.model import Decoder
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode
from jax_paged.models.testing import small_config
from jax_paged.native import load

LAYERS, ROWS = 48, 4
NAME = r'([\w.]+|"[^"]*")'  # of a function or a target
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
}


@pytest.fixture(autouse=True)
def for_cuda(monkeypatch):
    """As if the CUDA kernels were there: lowering a program calls none of them."""
    monkeypatch.setattr(load, "why_unavailable", lambda name, target: None)


def calls(text: str) -> dict[str, int]:
    """How often a program calls each target, a loop's body counting once.

    Functions that are called from several places are in the text once.
    """
    functions: dict[str, str] = {}
    for part in re.split(r"^  func\.func ", text, flags=re.M)[1:]:
        functions[re.findall(f"@{NAME}", part)[0]] = part

    def count(name: str) -> collections.Counter[str]:
        body = functions[name]
        found = collections.Counter(re.findall(f"custom_call @{NAME}", body))
        for callee in re.findall(f"(?<!custom_)call @{NAME}", body):
            found += count(callee)
        return found

    return {target: n for target, n in count("main").items() if target.startswith("jax_paged.")}


def lowered(function, *operands) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def model_and_state(model_type="qwen3", layer_kinds=None, **changes):
    config = small_config(model_type, num_hidden_layers=LAYERS, head_dim=64, **changes)
    graph, params = nnx.split(Decoder(config, abstract_source(config, jnp.bfloat16)))
    layers = {"num_layers": LAYERS} if layer_kinds is None else {"layer_kinds": layer_kinds}
    state = jax.eval_shape(
        lambda: KVState.create(
            num_pages=64, page_size=16, num_kv_heads=config.num_kv_heads, max_seqs=ROWS,
            head_dim=config.head_dim, pages_per_seq=16, dtype=jnp.bfloat16, **layers,
        )
    )  # fmt: skip
    return graph, params, state


def decode_step(graph):
    def step(params, state, tokens, rows):
        state, _ = state.reserve(rows, 1)
        state, batch, _ = state.step(rows, 1)
        return nnx.merge(graph, params)(tokens, batch, state)

    return step


def test_a_decode_step_of_48_layers_plans_once():
    graph, params, state = model_and_state()
    text = lowered(decode_step(graph), params, state, i32(ROWS), i32(ROWS))
    assert calls(text) == {
        "jax_paged.attention_plan.v1": 1,
        "jax_paged.attention.v1": LAYERS,
        "jax_paged.qkv_norm_rope_write.v2": LAYERS,
    }
    # The kernels know that there is one query in a row, and so launch no prefill.
    for target in ("attention_plan", "attention"):
        (call,) = re.findall(rf"custom_call @jax_paged\.{target}\.v1.*", text)
        assert "max_q_len = 1 : i64" in call


def test_a_mixed_step_plans_once_for_any_number_of_queries():
    graph, params, state = model_and_state("qwen3_moe")

    def step(params, state, tokens, rows, q_lens):
        state, _ = state.reserve(rows, q_lens)
        state, batch, _ = state.step(rows, q_lens, num_tokens=tokens.shape[0])
        return nnx.merge(graph, params)(tokens, batch, state)

    text = lowered(step, params, state, i32(19), i32(ROWS), i32(ROWS))
    counts = calls(text)
    assert counts["jax_paged.attention_plan.v1"] == 1
    assert counts["jax_paged.attention.v1"] == LAYERS
    assert "max_q_len" not in text


def test_layers_of_another_window_have_a_plan_of_their_own():
    graph, params, state = model_and_state(**WINDOWED)
    counts = calls(lowered(decode_step(graph), params, state, i32(ROWS), i32(ROWS)))
    assert counts["jax_paged.attention_plan.v1"] == 2
    assert counts["jax_paged.attention.v1"] == LAYERS


def test_groups_of_layers_have_a_plan_each():
    graph, params, state = model_and_state(layer_kinds=["full", 7] * (LAYERS // 2), **WINDOWED)
    counts = calls(lowered(decode_step(graph), params, state, i32(ROWS), i32(ROWS)))
    assert counts["jax_paged.attention_plan.v1"] == 2
    assert counts["jax_paged.attention.v1"] == LAYERS


def test_the_loop_of_a_generation_plans_once_in_a_round():
    graph, params, state = model_and_state()
    per_row = i32(ROWS)
    sampler = jax.eval_shape(lambda: Sampler.create(temperature=0.0, seed=0))

    def loop(params, state, last, rows, limits, stops, sampler, steps):
        progress = Progress(last, jnp.zeros_like(last), jnp.zeros_like(last))
        return decode(graph, params, state, progress, rows, limits, stops, sampler, steps, chunk=8)

    text = lowered(loop, params, state, per_row, per_row, per_row, i32(2), sampler, i32())
    counts = calls(text)
    assert counts["jax_paged.attention_plan.v1"] == 1
    assert counts["jax_paged.attention.v1"] == LAYERS
