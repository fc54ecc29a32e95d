# SPDX-License-Identifier: Apache-2.0
"""XLA:GPU compiles programs over eight H200, ahead of time and without a GPU.

What the tests of tests/ops/test_sharding*.py find in programs for the CPU holds for these, too:
native on each device, nothing gathered, one all-reduce where parts add up.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from h200 import h200_devices, host_traffic
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from split_heads import CALLS, IN_SHARD_MAP
from split_weights import (
    BY_EXPERT,
    BY_INNER,
    MIXTURES,
    PROJECTIONS,
    decode_step,
    in_pairs,
    mixture,
    project,
    projection,
    run_experts,
    specs_of,
    split_params,
)

import jax_paged
from jax_paged import KVState
from jax_paged.models import Decoder, make_mesh, split_model
from jax_paged.models.decoder import exchange, ring
from jax_paged.models.decoder.generation import make_state, state_for
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress
from jax_paged.models.testing import small_config
from jax_paged.testing import is_in_place


def mesh_of(shape, names):
    return Mesh(np.array(h200_devices(8)).reshape(shape), names)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of((2, 4), ("dp", "tp"))


def abstract(mesh, x, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def compiled_for(mesh, function, operands, specs):
    placed = [abstract(mesh, x, spec) for x, spec in zip(operands, specs, strict=True)]
    return jax.jit(function).lower(*placed).compile()


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_need_one_all_reduce_at_most(mesh, name):
    *specs, is_summed = PROJECTIONS[name]
    operands = projection("bfloat16", jnp.int8)
    compiled = compiled_for(mesh, project, operands, specs)
    assert meshes.collectives(compiled) == ["all-reduce"] * is_summed


@pytest.mark.parametrize("kind", [None, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_native_and_need_one_all_reduce(mesh, name, kind):
    split = MIXTURES[name]
    operands = mixture(dtype=jnp.bfloat16, kind=kind)
    if split[2] is not None:
        operands = [in_pairs(x) if i in (1, 5, 7) else x for i, x in enumerate(operands)]
    compiled = compiled_for(mesh, run_experts, operands, specs_of(*split, operands))
    assert meshes.targets(compiled) == ["jax_paged.moe_experts.v1"]
    assert meshes.collectives(compiled) == ["all-reduce"]
    assert host_traffic(compiled.as_text()) == []


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "is_mapped"),
    [(name, False) for name in CALLS] + [(name, True) for name in IN_SHARD_MAP],
)
def test_ops_split_by_heads_need_nothing_of_each_other(name, is_mapped):
    mesh = mesh_of((8,), ("tp",))
    call, operands, specs, out_specs, used = CALLS[name]()
    if is_mapped:
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs)
    compiled = compiled_for(mesh, call, [jnp.asarray(x) for x in operands], specs)
    on_cuda = set(jax_paged.build_info()["cuda"]["targets"])
    assert sorted(meshes.targets(compiled)) == sorted(x for x in used if x in on_cuda)
    assert meshes.collectives(compiled) == []


@pytest.mark.parametrize("of_experts", [BY_EXPERT, BY_INNER], ids=["by expert", "by inner"])
def test_a_layer_of_a_step_has_two_all_reduces_and_gathers_qkv_alone(of_experts):
    config = small_config(
        "qwen3_moe", num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        moe_intermediate_size=64, num_experts=16,
    )  # fmt: skip
    mesh = mesh_of((8,), ("tp",))
    graph, params = nnx.split(Decoder(config, abstract_source(config, jnp.bfloat16)))
    params = split_params(
        params, of_experts,
        lambda x, shape, spec: abstract(mesh, jax.ShapeDtypeStruct(shape, x.dtype), spec),
    )  # fmt: skip
    state = jax.eval_shape(
        lambda: KVState.create(
            num_layers=config.num_layers, num_pages=1024, page_size=16,
            num_kv_heads=config.num_kv_heads, head_dim=64, max_seqs=4, pages_per_seq=16,
            dtype=jnp.bfloat16,
        )
    )  # fmt: skip
    pool = state.k_pages
    state = jax.tree.map(
        lambda x: abstract(mesh, x, P(None, None, "tp") if x.shape == pool.shape else P()), state
    )

    rows = abstract(mesh, jax.ShapeDtypeStruct((4,), jnp.int32), P())
    program = jax.jit(decode_step(graph), donate_argnums=1)
    compiled = program.lower(params, state, rows, rows).compile()
    layers = config.num_layers
    found = collections.Counter(meshes.collectives(compiled))
    assert found == {"all-reduce": 2 * layers, "all-gather": layers}
    assert collections.Counter(meshes.targets(compiled)) == {
        "jax_paged.attention_plan.v1": 1,
        "jax_paged.qkv_norm_rope_write.v2": layers,
        "jax_paged.attention.v1": layers,
        "jax_paged.moe_experts.v1": layers,
    }
    shape = (*pool.shape[:2], pool.shape[2] // 8, *pool.shape[3:])
    assert is_in_place(compiled, jax.ShapeDtypeStruct(shape, pool.dtype))


def test_tokens_go_to_the_devices_of_their_experts_by_ragged_exchanges():
    """Names of experts, tokens and what comes back; before them each tells all how many."""
    tokens, k, count, hidden, inner, devices = 64, 4, 32, 256, 128, 8
    mesh = mesh_of((devices,), ("dp",))

    def local(x, gate_up, down, experts, weights):
        run = functools.partial(jax_paged.moe_experts, out_dtype=jnp.float32)
        first = jax.lax.axis_index("dp").astype(jnp.int32) * jnp.int32(count // devices)
        return exchange.exchanged(
            lambda x, ids, weights: run(x, gate_up, down, ids, weights),
            x, experts, weights, experts // (count // devices), first, "dp",
        )  # fmt: skip

    def operand(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = [
        operand(jnp.bfloat16, devices * tokens, hidden),
        operand(jnp.bfloat16, count, 2 * inner, hidden),
        operand(jnp.bfloat16, count, hidden, inner),
        operand(jnp.int32, devices * tokens, k),
        operand(jnp.float32, devices * tokens, k),
    ]  # fmt: skip
    specs = [P("dp", *[None] * (x.ndim - 1)) for x in operands]
    many = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs), out_specs=P("dp", None), check_vma=False
    )
    compiled = compiled_for(mesh, many, operands, specs)
    found = collections.Counter(meshes.collectives(compiled))
    assert found == {"ragged-all-to-all": 3, "all-gather": 1}
    assert meshes.targets(compiled) == ["jax_paged.moe_experts.v1"]
    assert host_traffic(compiled.as_text()) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tick_of_pipeline_stages_has_one_transfer(tp):
    """Beside it, what the devices of a stage of tp layers tell each other; no pool is copied."""
    config = small_config(
        num_hidden_layers=8, vocab_size=512, hidden_size=256, head_dim=64, num_attention_heads=8,
        num_experts=8, moe_intermediate_size=64,
    )  # fmt: skip
    mesh = make_mesh(config, pp=8 // tp, tp=tp, devices=h200_devices(8))
    model = Decoder(config, abstract_source(config, "bfloat16"), mesh=mesh)
    graph, params = split_model(model)
    state = make_state((graph, params), functools.partial(state_for, model, [4000] * 16))
    rows = np.arange(16, dtype=np.int32)
    given = Progress(rows, rows, rows), rows, rows, rows, Sampler.create(temperature=1.0), rows[3]
    compiled = ring.decode.lower(
        graph, params, state, *jax.tree.map(lambda x: abstract(mesh, x, P()), given),
        micro_batches=8 // tp, chunk=8,
    ).compile()  # fmt: skip
    found = collections.Counter((x.kind, x.loops) for x in meshes.told(compiled).elements())
    of_stage = {("all-reduce", 1): 1 + 2 * tp, ("all-gather", 1): 1} if tp > 1 else {}
    assert found == of_stage | {("collective-permute", 1): 1, ("all-reduce", 0): 2}
    assert host_traffic(compiled.as_text()) == []
    pool = state.k_pages.sharding.shard_shape(state.k_pages.shape)
    assert is_in_place(compiled, jax.ShapeDtypeStruct(pool, state.k_pages.dtype))
