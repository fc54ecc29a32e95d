# SPDX-License-Identifier: Apache-2.0
"""Heads split over devices: the bits of one device, no pool gathered, moved or copied.

Each program below runs in a process of its own (this file as a script), because the number of
devices is fixed when JAX starts. More programs over several devices are in test_concurrency.py.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_same, check_in_a_process, collectives, place, run_chosen
from split_weights import BY_EXPERT, BY_INNER, decode_step, split_params
from tiers import first_of

import jax_paged
from jax_paged import (
    attention_plan,
    copy_pages,
    paged_attention,
    ragged_paged_attention,
    write_kv,
)
from jax_paged.layout import kv_heads_axis
from jax_paged.models import Decoder, generate
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import Split
from jax_paged.testing import Case, is_in_place, make_batch

DEVICES = 8
STACKED = Case("stacked", 16, 8, 32, page_size=8, num_layers=2)
FLAT_NHD = Case("flat_nhd", 8, 8, 16, page_size=4, layout="NHD")
ONE_POOL = Case("one_pool", 24, 8, 16, page_size=4, layout="rpa")  # 3 heads of q beside 2 rows
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step over a batch: writes the new tokens' K and V, attends on the returned pages."""

    case: Case
    decode: bool
    planned: bool = False  # ahead of the write

    def __call__(self, k_pages, v_pages, q, k, v, slots, table, seq_lens, *rest):
        options = {"layout": self.case.layout}
        if self.case.num_layers is not None:
            *rest, options["layer"] = rest
        plan = None
        if self.planned:
            plan = attention_plan(
                q, k_pages, v_pages, table, seq_lens, *rest, layout=self.case.layout
            )
        pages = write_kv(k_pages, v_pages, k, v, slots, **options)
        attend = paged_attention if self.decode else ragged_paged_attention
        options |= {"plan": plan, "return_lse": True}
        return pages, *attend(q, *pages, table, seq_lens, *rest, **options)

    def operands(self, seed=0):
        """k_pages, v_pages, q, k, v, slots, …; the new tokens go to the last slots of each row."""
        q_lens = [1, 1, 1] if self.decode else [1, 9, 1]
        batch = make_batch(self.case, jnp.float32, q_lens, [40, 9, 77], seed=seed)
        q, *pages, table, seq_lens = batch.operands()
        shape = (2, q.shape[0], self.case.num_kv_heads, self.case.head_dim)
        k, v = np.random.default_rng(seed).standard_normal(shape, "f4")
        places = [
            (row, n - q_len + i)
            for row, (q_len, n) in enumerate(zip(q_lens, batch.seq_lens, strict=True))
            for i in range(q_len)
        ]
        size = self.case.page_size
        slots = [batch.page_table[row, at // size] * size + at % size for row, at in places]
        rest = () if self.decode else (jnp.asarray(batch.cu_q_lens),)
        if batch.layer is not None:
            rest += (jnp.int32(batch.layer),)
        new = (jnp.asarray(k), jnp.asarray(v), jnp.asarray(np.array(slots, np.int32)))
        return *pages, q, *new, table, seq_lens, *rest

    def specs(self, operands, names="tp"):
        """How the operands are split: pools, q, k and v by heads, the others not at all."""
        pool = [None] * operands[0].ndim
        pool[kv_heads_axis(operands[0], self.case.layout)] = names
        return (P(*pool),) * 2 + (P(None, names),) * 3 + (P(),) * (len(operands) - 5)


STEPS = [
    Step(STACKED, True), Step(STACKED, False), Step(FLAT_NHD, True), Step(FLAT_NHD, False),
    Step(STACKED, True, planned=True), Step(FLAT_NHD, False, planned=True), Step(ONE_POOL, False),
]  # fmt: skip


def make_mesh(axis_type, shape=(DEVICES,), names=("tp",)):
    return meshes.make_mesh(shape, names, axis_type)


def local_pool(pages):
    shard = pages.addressable_shards[0].data
    return jax.ShapeDtypeStruct(shard.shape, shard.dtype)


def addresses(pages):
    pools = jax.tree.leaves(pages)
    return {s.data.unsafe_buffer_pointer() for x in pools for s in x.addressable_shards}


def assert_split_by_heads(function, step, operands, placed, expected):
    """Compiles with the pools donated and checks everything that a split by heads promises."""
    compiled = jax.jit(function, donate_argnums=(0, 1)).lower(*placed).compile()
    assert collectives(compiled) == []
    assert is_in_place(compiled, local_pool(placed[0]))
    before = addresses(placed[:2])
    results = compiled(*placed)
    assert addresses(results[0]) == before
    assert_same(results, expected)
    pool, *_, heads = step.specs(operands)[:3]
    pools = [pool] * len(jax.tree.leaves(results[0]))
    for x, spec in zip(jax.tree.leaves(results), (*pools, heads, heads), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, spec), x.ndim), x.sharding


def shard_map_runs_each_op_on_its_heads():
    for step in STEPS:
        operands = step.operands()
        expected = jax.jit(step)(*operands)
        specs = step.specs(operands)
        for axis_type in AXIS_TYPES:
            mesh = make_mesh(axis_type)
            out_specs = (specs[:2], specs[2], specs[2])
            local = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs)
            placed = place(mesh, operands, specs)
            assert_split_by_heads(local, step, operands, placed, expected)


def plain_jit_runs_each_op_on_its_heads():
    for step in STEPS:
        operands = step.operands()
        expected = jax.jit(step)(*operands)
        for axis_type in AXIS_TYPES:
            placed = place(make_mesh(axis_type), operands, step.specs(operands))
            assert_split_by_heads(step, step, operands, placed, expected)


def small_operands_follow_the_pools():
    step = Step(STACKED, True)
    operands = step.operands()
    expected = jax.jit(step)(*operands)
    specs = step.specs(operands)
    placed = place(make_mesh(AxisType.Auto), operands, (*specs[:2], *[P()] * 3, *specs[5:]))
    assert_split_by_heads(step, step, operands, placed, expected)
    mesh = make_mesh(AxisType.Auto, (2, 4), ("dp", "tp"))  # the pool is whole along dp
    finer = place(mesh, operands, (*specs[:2], *[P(None, ("dp", "tp"))] * 3, *specs[5:]))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*finer).compile()
    assert collectives(compiled), "q, k and v have to move"
    assert is_in_place(compiled, local_pool(finer[0]))
    assert_same(compiled(*finer), expected)


def loops_keep_the_split_pool_in_place():
    step = Step(STACKED, True)
    *operands, layer = step.operands()
    operands[:2] = [jnp.nan_to_num(x) for x in operands[:2]]

    def layers(pages, q, *rest):
        def body(carry, layer):
            pages, q = carry
            pages, out, _ = step(*pages, q, *rest, layer)
            return (pages, q + out), None

        return jax.lax.scan(body, (pages, q), jnp.arange(2, dtype=layer.dtype))[0]

    def loop(k_pages, v_pages, q, *rest):
        def again(carry):
            number, pages, q = carry
            return (number + 1, *layers(pages, q, *rest))

        state = (jnp.int32(0), (k_pages, v_pages), q)
        return jax.lax.while_loop(lambda carry: carry[0] < 3, again, state)[1:]

    expected = jax.jit(loop)(*operands)
    placed = place(make_mesh(AxisType.Auto), operands, step.specs(operands))
    compiled = jax.jit(loop, donate_argnums=(0, 1)).lower(*placed).compile()
    assert collectives(compiled) == []
    assert is_in_place(compiled, local_pool(placed[0]))
    before = addresses(placed[:2])
    pages, out = compiled(*placed)
    assert addresses(pages) == before
    assert_same((pages, out), expected)


def eager_ops_and_copies_keep_the_split_pool_in_place():
    for step in (Step(STACKED, True), Step(FLAT_NHD, True)):
        operands = step.operands()
        ids = (np.array([0, -1], np.int32), np.array([1, 2], np.int32))
        expected = step(*(x + 0 for x in operands[:2]), *operands[2:])
        expected = copy_pages(*expected[0], *ids), *expected[1:]
        placed = place(make_mesh(AxisType.Auto), operands, step.specs(operands))
        copy = copy_pages
        copied = jax.jit(copy, donate_argnums=(0, 1)).lower(*placed[:2], *ids).compile()
        assert collectives(copied) == []
        before = addresses(placed[:2])
        pages, out, lse = step(*placed)
        pages = copy(*pages, *ids)
        assert addresses(pages) == before
        assert_same((pages, out, lse), expected)


def transforms_keep_the_split():
    step = Step(STACKED, True)
    k_pages, v_pages, q, _, _, _, table, seq_lens, layer = step.operands()
    mesh = make_mesh(AxisType.Auto)
    placed = place(mesh, (k_pages, v_pages, q), step.specs(step.operands())[:3])

    def attend(scale, k_pages, v_pages, q):
        return paged_attention(q, k_pages, v_pages, table, seq_lens, layer=layer, sm_scale=scale)

    scales = jnp.array([0.1, 0.2], jnp.float32)
    batched = jax.jit(jax.vmap(attend, in_axes=(0, None, None, None)))
    assert collectives(batched.lower(scales, *placed).compile()) == []
    assert_same(batched(scales, *placed), batched(scales, k_pages, v_pages, q))
    loss = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), argnums=(0, 3)))
    for a, b in zip(loss(scales[0], *placed), loss(scales[0], k_pages, v_pages, q), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def a_program_inside_shard_map_can_be_exported():
    step = Step(STACKED, True)
    operands = step.operands()
    specs = step.specs(operands)
    mesh = make_mesh(AxisType.Auto)
    placed = place(mesh, operands, specs)
    out_specs = (specs[:2], specs[2], specs[2])
    local = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs)
    checks = [export.DisabledSafetyCheck.custom_call(x) for x in jax_paged.build_info()["targets"]]
    exported = export.export(jax.jit(local), disabled_checks=checks)(*placed)
    restored = export.deserialize(exported.serialize())
    assert_same(jax.jit(restored.call)(*placed), jax.jit(step)(*operands))
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        export.export(jax.jit(step), disabled_checks=checks)(*placed)


def pools_split_otherwise_are_refused():
    step = Step(STACKED, True)
    operands = step.operands()
    specs = step.specs(operands)
    bad = {
        "k_pages": (P(None, None, None, "tp"), specs[1], "axis 3 split over 'tp'"),
        "v_pages": (specs[0], P(), "it whole"),
    }
    for name, (*pools, got) in bad.items():
        for axis_type in AXIS_TYPES:
            placed = place(make_mesh(axis_type), operands, (*pools, *specs[2:]))
            error = jax.errors.JaxRuntimeError if axis_type == AxisType.Auto else ValueError
            message = rf"write_kv.v1: {name}: expected to be split over devices by KV heads alone, "
            message += rf"as .*, got {got}, "
            with pytest.raises(error, match=message):
                jax.jit(step).lower(*placed).compile()


def an_op_that_cannot_be_split_refuses_split_operands():
    x = jnp.zeros((DEVICES, 4), jnp.float32)
    call = functools.partial(
        ffi_call, "jax_paged.none.v1", attributes={}, split=Split({"x": "- -"}, ["- -"]),
        implementation=None, reference=lambda x: (x + x,),
    )  # fmt: skip
    placed = place(make_mesh(AxisType.Auto), [x], [P("tp")])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"none\.v1: x: expected to be whole"):
        jax.jit(lambda x: call(operands=[x])).lower(*placed).compile()


def a_program_on_one_of_the_devices_is_native():
    x, weight = jnp.ones((4, 16), jnp.float32), jnp.ones((DEVICES, 16), jnp.float32)
    expected = jax.jit(jax_paged.linear)(x, weight)
    for device in (jax.devices()[0], jax.devices()[-1]):
        placed = jax.device_put((x, weight), device)
        compiled = jax.jit(jax_paged.linear).lower(*placed).compile()
        assert meshes.targets(compiled) == ["jax_paged.linear.v2"]
        out = compiled(*placed)
        assert out.devices() == {device}
        assert_same(out, expected)


def axes_left_automatic_inside_shard_map_are_refused():
    step = Step(STACKED, True)
    operands = step.operands()
    mesh = make_mesh(AxisType.Auto, (2, 4), ("dp", "tp"))
    whole = (P(),) * len(operands)
    partly = jax.shard_map(
        step, mesh=mesh, in_specs=whole, out_specs=((P(), P()), P(), P()), axis_names={"dp"},
        check_vma=False,
    )  # fmt: skip
    placed = place(mesh, operands, step.specs(operands))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"in jax\.shard_map all its axes manual"):
        jax.jit(partly).lower(*placed).compile()


def the_older_partitioner_splits_by_heads_too():
    jax.config.update("jax_use_shardy_partitioner", False)
    step = Step(STACKED, False)
    operands = step.operands()
    expected = jax.jit(step)(*operands)
    placed = place(make_mesh(AxisType.Auto), operands, step.specs(operands))
    assert_split_by_heads(step, step, operands, placed, expected)


def split_model(model, mesh, of_experts):
    def put(x, shape, spec):
        return jax.device_put(x.reshape(shape), NamedSharding(mesh, spec))

    graph, params = nnx.split(model)
    return nnx.merge(graph, split_params(params, of_experts, put))


def split_state(state, mesh):
    k_pages, v_pages = place(mesh, (state.k_pages, state.v_pages), [P(None, None, "tp")] * 2)
    return state.replace(k_pages=k_pages, v_pages=v_pages)


def generate_runs_with_weights_and_pools_split():
    config = small_config("qwen3_moe", moe_intermediate_size=32)  # two KV heads
    model = Decoder(config, random_source(config, seed=1))
    prompts = [[1, 2, 3], [5], list(range(20))]
    options = {"max_new_tokens": 12, "chunk": 4}
    state = create_state(model, num_pages=64, max_seqs=4, pages_per_seq=4)
    expected = generate(model, prompts, state=state, **options)
    state = expected.state
    mesh = make_mesh(AxisType.Auto, (2,))
    for of_experts in (BY_EXPERT, BY_INNER):
        state = split_state(state, mesh)
        before = addresses((state.k_pages, state.v_pages))
        own = split_model(model, mesh, of_experts)
        generation = generate(own, prompts, state=state, **options)
        assert generation.tokens == expected.tokens
        state = generation.state
        assert addresses((state.k_pages, state.v_pages)) == before


def a_layer_of_a_step_has_two_all_reduces_and_gathers_qkv_alone():
    config = small_config(
        "qwen3_moe", num_attention_heads=16, num_key_value_heads=8, head_dim=16,
        moe_intermediate_size=64, num_experts=16,
    )  # fmt: skip
    model = Decoder(config, random_source(config, seed=1))
    mesh = make_mesh(AxisType.Auto)

    rows = jnp.arange(4, dtype=jnp.int32)
    for of_experts in (BY_EXPERT, BY_INNER):
        state = create_state(model, num_pages=64, max_seqs=4, pages_per_seq=4)
        state = split_state(state, mesh)
        graph, params = nnx.split(split_model(model, mesh, of_experts))
        program = jax.jit(decode_step(graph), donate_argnums=1)
        compiled = program.lower(params, state, rows, rows).compile()
        found = collections.Counter(collectives(compiled))
        layers = config.num_layers
        assert found == {"all-reduce": 2 * layers, "all-gather": layers}
        width = (16 + 2 * 8) * 16  # of qkv
        assert len(re.findall(rf"f32\[4,{width}\]\S* all-gather\(", compiled.as_text())) == layers
        counts = collections.Counter(meshes.targets(compiled))
        assert counts == {
            "jax_paged.linear.v2": 3 * layers + 1,  # with the router, and the head
            "jax_paged.qkv_norm_rope_write.v2": layers,
            "jax_paged.attention.v1": layers,
            "jax_paged.moe_experts.v1": layers,
        }
        assert is_in_place(compiled, local_pool(state.k_pages))


PROGRAMS = {
    program.__name__: program
    for program in (
        shard_map_runs_each_op_on_its_heads,
        plain_jit_runs_each_op_on_its_heads,
        small_operands_follow_the_pools,
        loops_keep_the_split_pool_in_place,
        eager_ops_and_copies_keep_the_split_pool_in_place,
        transforms_keep_the_split,
        a_program_inside_shard_map_can_be_exported,
        pools_split_otherwise_are_refused,
        an_op_that_cannot_be_split_refuses_split_operands,
        a_program_on_one_of_the_devices_is_native,
        axes_left_automatic_inside_shard_map_are_refused,
        a_layer_of_a_step_has_two_all_reduces_and_gathers_qkv_alone,
        the_older_partitioner_splits_by_heads_too,
        generate_runs_with_weights_and_pools_split,
    )
}


@pytest.mark.parametrize("program", first_of(PROGRAMS, len(PROGRAMS) - 2))
def test_on_eight_devices(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
