# SPDX-License-Identifier: Apache-2.0
"""XLA:GPU compiles our programs for an H200, ahead of time and without a GPU.

This proves that the handlers are found under their names, which buffers XLA copies and what crosses
to the host. It runs no kernel. It needs `pip install 'jax_paged[gpu-aot]'` (the compiler, 400 MB)
and CUDA kernels built; without them it is skipped, which JAX_PAGED_REQUIRE_GPU_AOT=1 turns into a
failure.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from h200 import custom_calls, h200_devices, host_traffic
from jax.sharding import SingleDeviceSharding

import jax_paged
from jax_paged import KVState
from jax_paged.models import Decoder
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, admit, decode, prefill
from jax_paged.models.serving.step import EngineState, PageOrders, keep
from jax_paged.models.testing import small_config
from jax_paged.testing import is_in_place, pool_sized_ops

CONFIG = small_config("qwen3_moe", head_dim=64)
ROWS, PROMPT_TOKENS, CHUNK = 4, 64, 16


@pytest.fixture(scope="module")
def on_h200():
    """A function that puts abstract operands onto the H200."""
    sharding = SingleDeviceSharding(h200_devices(1)[0])

    def place(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    return place


@pytest.fixture(scope="module")
def graph_and_params(on_h200):
    """The small Qwen3-MoE in bf16, without values."""
    graph, params = nnx.split(Decoder(CONFIG, abstract_source(CONFIG, jnp.bfloat16)))
    return graph, on_h200(params)


def new_state():
    """A state whose pools are larger than anything else in the programs."""
    return KVState.create(
        num_layers=CONFIG.num_layers, num_pages=1024, page_size=16,
        num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim, max_seqs=ROWS,
        pages_per_seq=256, dtype=jnp.bfloat16,
    )  # fmt: skip


POOL = jax.eval_shape(lambda: new_state().k_pages)
POOL_BYTES = POOL.size * POOL.dtype.itemsize


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def step(graph, params, state, rows, q_lens, tokens):
    """Feeds q_lens[i] new tokens to each row: decode, prefill or both, by the lengths."""
    table, reserved = state.table.reserve(rows, q_lens)
    table, batch, _ = table.step(rows, q_lens, num_tokens=tokens.shape[0])
    state = state.replace(table=table)
    logits, state = nnx.merge(graph, params)(tokens, batch, state)
    return state, logits, reserved


def whole_generation(
    graph, params, state, rows, counts, tokens, last, limits, stop_tokens, sampler, num_steps
):
    """Admission, prefill and the decode loop, as `generate` runs them, in one program."""
    table, reasons = admit(state.table, rows, counts + 1)
    state = state.replace(table=table)
    state = prefill(graph, params, state, rows, counts, tokens)
    progress = Progress(last, jnp.zeros_like(last), reasons)
    return decode(
        graph, params, state, progress, rows, limits, stop_tokens, sampler, num_steps, chunk=CHUNK
    )


PER_ROW = i32(ROWS)
SAMPLER = jax.eval_shape(lambda: Sampler.create(temperature=0.8, top_k=20, top_p=0.9, seed=0))
PROGRAMS = {
    "decode": (step, (PER_ROW, PER_ROW, i32(ROWS))),
    "mixed": (step, (PER_ROW, PER_ROW, i32(3 * ROWS + 7))),
    "generate": (
        whole_generation,
        (PER_ROW, PER_ROW, i32(PROMPT_TOKENS), PER_ROW, PER_ROW, i32(4), SAMPLER, i32()),
    ),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def compiled(request, on_h200, graph_and_params):
    """A program's name, and the program, compiled with its state donated."""
    function, operands = PROGRAMS[request.param]
    graph, params = graph_and_params
    state = on_h200(jax.eval_shape(new_state))
    program = jax.jit(functools.partial(function, graph), donate_argnames="state")
    return request.param, program.lower(params, state, *on_h200(operands)).compile()


def test_every_layer_calls_our_handlers(compiled):
    name, program = compiled
    counts = collections.Counter(custom_calls(program))
    ours = {target: n for target, n in counts.items() if target.startswith("jax_paged.")}
    layers = CONFIG.num_layers
    # A prefill wants no logits, so its last layer only writes its pages.
    most, all_but_one = (2 * layers, 2 * layers - 1) if name == "generate" else (layers, layers)
    assert ours == {
        "jax_paged.attention_plan.v1": 2 if name == "generate" else 1,  # of a step
        "jax_paged.qkv_norm_rope_write.v2": most,
        "jax_paged.attention.v1": all_but_one,
        "jax_paged.moe_experts.v1": all_but_one,
    }


def test_a_handler_that_is_not_registered_fails_to_compile(on_h200):
    x = on_h200(jax.ShapeDtypeStruct((8,), jnp.float32))
    call = jax.jit(lambda x: jax.ffi.ffi_call("jax_paged.nothing.v1", x)(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jax_paged\.nothing\.v1"):
        call.lower(x).compile()


def test_no_pool_is_copied(compiled):
    _, program = compiled
    assert pool_sized_ops(program, POOL) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES


@pytest.mark.parametrize("name", ["keep", "fork"])
def test_pages_are_copied_within_a_pool_in_place(on_h200, name):
    """XLA:GPU gathers pages and scatters them; a gather within the scatter would copy the pool."""
    if name == "keep":
        device = jax.eval_shape(lambda: EngineState.create(new_state(), CONFIG.vocab_size))
        program, operands = keep, (device, PageOrders.create(device.state.table, 8).packed())
    else:
        rows = np.zeros(2, np.int32)
        program = jax.jit(lambda state, *rows: state.fork(*rows), donate_argnums=0)
        operands = jax.eval_shape(new_state), rows, rows + 1, rows + 5
    memory = program.lower(*on_h200(operands)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 4


def test_a_pool_that_is_not_donated_is_found_to_be_copied(on_h200, graph_and_params):
    graph, params = graph_and_params
    function, operands = PROGRAMS["decode"]
    state = on_h200(jax.eval_shape(new_state))
    program = jax.jit(functools.partial(function, graph))
    assert not is_in_place(program.lower(params, state, *on_h200(operands)).compile(), POOL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_moe_experts_copies_no_expert_and_asks_the_host_nothing(on_h200, dtype):
    tokens, num_experts, hidden, inner, k = 9, 16, 128, 96, 4
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16 if dtype == "int8" else dtype)
    gate_up, down = (
        jax.ShapeDtypeStruct((num_experts, *shape), dtype)
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    weights = jax.ShapeDtypeStruct((tokens, k), jnp.float32)
    scales = {}
    if dtype == "int8":
        of_gate_up, of_down = (
            jax.ShapeDtypeStruct(experts.shape[:2], jnp.float32) for experts in (gate_up, down)
        )
        scales = {"gate_up_scale": of_gate_up, "down_scale": of_down}
    operands = on_h200((x, gate_up, down, i32(tokens, k), weights))
    program = jax.jit(jax_paged.moe_experts).lower(*operands, **on_h200(scales)).compile()
    assert custom_calls(program) == ["jax_paged.moe_experts.v1"]
    text = program.as_text() or ""
    assert host_traffic(text) == []
    assert not re.search(rf"\[{num_experts},\d+,\d+\]\S* (copy|transpose|convert)\(", text)


def test_nothing_goes_through_the_host(compiled):
    """But for the flag that XLA's own while loop reads to know whether to go on."""
    _, program = compiled
    assert host_traffic(program.as_text()) == []


def test_the_search_finds_host_traffic():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    program = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(x).compile()
    assert host_traffic(program.as_text())  # on the CPU: for a GPU that is not there JAX refuses
    assert host_traffic("  %send.1 = (f32[8]{0}, u32[], token[]) send(%x, %token), channel_id=1")
    assert host_traffic("  %copy.1 = f32[8]{0:S(5)} copy(%x)")
    assert not host_traffic("  %copy.1 = f32[8]{0} copy(%sender)")
