# SPDX-License-Identifier: Apache-2.0
"""Heads split over devices: the bits of one device, no pool gathered, moved or copied.

Each program below runs in a process of its own (this file as a script), because the number of
devices is fixed when JAX starts. More programs over several devices are in test_concurrency.py.
"""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import on_devices
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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
from jax_paged.native.sharding import HeadAxes
from jax_paged.testing import Case, is_in_place, make_batch

DEVICES = 8
TIMEOUT_S = 300
STACKED = Case("stacked", 16, 8, 32, page_size=8, num_layers=2)
FLAT_NHD = Case("flat_nhd", 8, 8, 16, page_size=4, layout="NHD")
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
    Step(STACKED, True, planned=True), Step(FLAT_NHD, False, planned=True),
]  # fmt: skip


def make_mesh(axis_type, shape=(DEVICES,), names=("tp",)):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def place(mesh, operands, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)]


def local_pool(pages):
    shard = pages.addressable_shards[0].data
    return jax.ShapeDtypeStruct(shard.shape, shard.dtype)


def addresses(pages):
    return {s.data.unsafe_buffer_pointer() for x in pages for s in x.addressable_shards}


def collectives(compiled):
    words = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return re.findall(words, compiled.as_text())


def assert_same(results, expected):
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


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
    for x, spec in zip(jax.tree.leaves(results), (pool, pool, heads, heads), strict=True):
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


def an_op_without_heads_refuses_split_operands():
    x = jnp.zeros((DEVICES, 4), jnp.float32)
    call = functools.partial(
        ffi_call, "jax_paged.none.v1", attributes={}, heads=HeadAxes({"x": None}, [None]),
        implementation=None, reference=lambda x: (x + x,),
    )  # fmt: skip
    placed = place(make_mesh(AxisType.Auto), [x], [P("tp")])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"none\.v1: x: expected to be split"):
        jax.jit(lambda x: call(operands=[x])).lower(*placed).compile()


def a_program_on_one_of_the_devices_is_native():
    x, weight = jnp.ones((4, 16), jnp.float32), jnp.ones((DEVICES, 16), jnp.float32)
    program = jax.jit(jax_paged.linear)
    assert "jax_paged.linear" in program.lower(x, weight).compile().as_text()
    split = place(make_mesh(AxisType.Auto), [x, weight], [P(), P("tp")])
    text = program.lower(*split).compile().as_text()
    assert "jax_paged.linear" not in text
    assert "all-gather" not in text
    assert_same(program(*split), program(x, weight))
    last = [jax.device_put(a, jax.devices()[-1]) for a in (x, weight)]
    assert program(*last).devices() == {jax.devices()[-1]}


def experts_split_by_expert_are_refused():
    key = jax.random.key(0)
    gate_up = jax.random.normal(key, (DEVICES, 32, 16), jnp.float32)
    down = jax.random.normal(key, (DEVICES, 16, 16), jnp.float32)
    tokens = jnp.ones((8, 16), jnp.float32), jnp.arange(16).reshape(8, 2) % DEVICES
    operands = tokens[0], gate_up, down, tokens[1], jnp.ones((8, 2), jnp.float32)
    program = jax.jit(jax_paged.moe_experts)
    expected = program(*operands)
    assert "jax_paged.moe_experts" in program.lower(*operands).compile().as_text()
    mesh = make_mesh(AxisType.Auto)
    for specs in ([P("tp"), P(), P(), P("tp"), P("tp")], [P(), P(), P(None, None, "tp"), P(), P()]):
        np.testing.assert_allclose(
            program(*place(mesh, operands, specs)), expected, rtol=1e-4, atol=1e-3
        )
    for name, number in (("gate_up", 1), ("down", 2)):
        specs = [P("tp") if i == number else P() for i in range(len(operands))]
        message = rf"{name}: expected all experts whole on each device, got axis 0 split over 'tp'"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            program.lower(*place(mesh, operands, specs)).compile()


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


def generate_runs_with_weights_and_pools_split():
    config = small_config("qwen3_moe")  # two KV heads
    model = Decoder(config, random_source(config, seed=1))
    prompts = [[1, 2, 3], [5], list(range(20))]
    options = {"max_new_tokens": 12, "chunk": 4}
    state = create_state(model, num_pages=64, max_seqs=4, pages_per_seq=4)
    expected = generate(model, prompts, state=state, **options)
    mesh = make_mesh(AxisType.Auto, (2,))
    by_name = {"qkv": P("tp"), "out": P(None, "tp"), "gate_up": P(None, "tp"),
               "down": P(None, None, "tp")}  # fmt: skip

    def split(path, x):
        names = [getattr(key, "key", None) for key in path]
        spec = next((by_name[name] for name in names if name in by_name), P())
        return jax.device_put(x, NamedSharding(mesh, spec))

    graph, params = nnx.split(model)
    params = jax.tree_util.tree_map_with_path(split, params)
    state = expected.state
    k_pages, v_pages = place(mesh, (state.k_pages, state.v_pages), [P(None, None, "tp")] * 2)
    before = addresses((k_pages, v_pages))
    state = state.replace(k_pages=k_pages, v_pages=v_pages)
    generation = generate(nnx.merge(graph, params), prompts, state=state, **options)
    assert generation.tokens == expected.tokens
    assert addresses((generation.state.k_pages, generation.state.v_pages)) == before


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
        an_op_without_heads_refuses_split_operands,
        a_program_on_one_of_the_devices_is_native,
        experts_split_by_expert_are_refused,
        axes_left_automatic_inside_shard_map_are_refused,
        the_older_partitioner_splits_by_heads_too,
        generate_runs_with_weights_and_pools_split,
    )
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_eight_devices(program):
    child = subprocess.run(
        [sys.executable, "-W", "error", __file__, program],
        env=on_devices(DEVICES),
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == DEVICES
    for name in sys.argv[1:]:
        PROGRAMS[name]()
        print("passed", name)
