# SPDX-License-Identifier: Apache-2.0
"""Weights split over devices: native on each, nothing gathered, one all-reduce where parts add up.

The programs below run in processes of their own (this file as a script).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    assert_same,
    check_in_a_process,
    collectives,
    make_mesh,
    place,
    run_chosen,
    targets,
)
from split_weights import (
    MIXTURES,
    PROJECTIONS,
    in_pairs,
    mixture,
    project,
    projection,
    run_experts,
    specs_of,
)
from tiers import first_of

from jax_paged import linear, lora
from jax_paged.ops.zero_pool import zero_pool
from jax_paged.testing.projections import quantize_blocks

DEVICES = 8
F32_SUMS = {"rtol": 1e-6, "atol": 2e-6}  # of numbers around 1, added up in another order


def compiled_for(function, mesh, operands, specs):
    placed = place(mesh, operands, specs)
    compiled = jax.jit(function).lower(*placed).compile()
    return compiled, compiled(*placed)


def meshes_and(splits, dtype):
    """(shape of a mesh of dp and tp, name of a split): all splits on one, and some on others."""
    yield from (((2, 4), name) for name in splits)
    if dtype == jnp.float32:
        few = [name for name in ("outputs", "depth", "experts", "inner") if name in splits]
        yield from ((shape, name) for shape in ((1, 2), (2, 2), (1, 8)) for name in few)


def assert_rounded_once(out, exact, dtype):
    """out: f32 sums in another order, rounded to dtype: by at most half a unit, 2^-8 in bf16."""
    assert out.dtype == dtype
    tolerance = F32_SUMS if dtype == jnp.float32 else F32_SUMS | {"rtol": 2.0**-8}
    np.testing.assert_allclose(np.asarray(out, "f4"), exact, **tolerance)


def linear_is_native_on_each_device():
    for operands in (projection(), projection("bfloat16", jnp.int8)):
        exact = jax.jit(lambda *x: project(*x, out_dtype=jnp.float32))(*operands)
        expected = jax.jit(project)(*operands)
        dtype = operands[0].dtype
        for shape, name in meshes_and(PROJECTIONS, dtype):
            *specs, is_summed = PROJECTIONS[name]
            given = specs[: len(operands)]
            compiled, out = compiled_for(project, make_mesh(shape), operands, given)
            assert targets(compiled) == ["jax_paged.linear.v2"], (name, shape)
            assert collectives(compiled) == ["all-reduce"] * is_summed, (name, shape)
            if is_summed:
                assert_rounded_once(out, exact, dtype)
            else:
                assert_same(out, expected)


def a_token_keeps_its_bits_whatever_its_batch_and_its_device():
    x, weight = projection()
    mesh = make_mesh((2, 4))
    for spec in (P("tp"), P(None, "tp")):
        together = compiled_for(linear, mesh, (x, weight), (P("dp"), spec))[1]
        alone = compiled_for(linear, mesh, (x[5:6], weight), (P(), spec))[1]
        assert_same(together[5:6], alone)


def tokens_that_do_not_count_are_0_on_each_device():
    x, weight = projection()
    live = jnp.arange(len(x)) % 3 != 1
    expected = jax.jit(linear)(x, weight, live=live)
    mesh, given = make_mesh((2, 4)), (x, weight, live)
    for specs in ((P("dp"), P("tp"), P("dp")), (P("dp"), P("tp"), P()), (P(), P("tp"), P())):
        call = lambda x, weight, live: linear(x, weight, live=live)  # noqa: E731
        compiled, out = compiled_for(call, mesh, given, specs)
        assert targets(compiled) == ["jax_paged.linear.v2"]
        assert collectives(compiled) == []
        assert_same(out, expected)


def gradients_and_batches_of_a_split_weight_are_those_of_one_device():
    x, weight = projection()

    def loss(x, weight):
        return jnp.sum(jnp.sin(linear(x, weight)))

    batched = jax.vmap(linear, (0, None))
    for specs in ((P(), P("tp")), (P(None, "tp"), P(None, "tp"))):
        placed = place(make_mesh((1, 8)), (x, weight), specs)
        gradients = jax.jit(jax.grad(loss, (0, 1)))
        for a, b in zip(gradients(*placed), gradients(x, weight), strict=True):
            np.testing.assert_allclose(a, b, **F32_SUMS)
        several = jnp.stack([x, 2 * x])
        compiled = jax.jit(batched).lower(several, placed[1]).compile()
        assert targets(compiled) == ["jax_paged.linear.v2"]
        np.testing.assert_allclose(
            compiled(several, placed[1]), batched(several, weight), **F32_SUMS
        )


def experts_are_native_on_each_device():
    for operands in (mixture(), mixture(dtype=jnp.bfloat16, kind=jnp.int8)):
        exact = jax.jit(lambda *x: run_experts(*x, out_dtype=jnp.float32))(*operands)
        dtype = operands[0].dtype
        paired = [in_pairs(x) if i in (1, 5, 7) else x for i, x in enumerate(operands)]
        assert_same(jax.jit(run_experts)(*paired), jax.jit(run_experts)(*operands))
        for shape, name in meshes_and(MIXTURES, dtype):
            split = MIXTURES[name]
            given = operands if split[2] is None else paired
            specs = specs_of(*split, operands)
            compiled, out = compiled_for(run_experts, make_mesh(shape), given, specs)
            assert targets(compiled) == ["jax_paged.moe_experts.v1"], (name, shape)
            assert collectives(compiled) == ["all-reduce"], (name, shape)
            assert_rounded_once(out, exact, dtype)


def experts_whose_blocks_have_scales_split_by_expert():
    operands = mixture(kind=jnp.float8_e4m3fn, blocks=True)
    compiled, out = compiled_for(
        run_experts, make_mesh((1, 8)), operands, specs_of(None, "tp", None, operands)
    )
    assert targets(compiled) == ["jax_paged.moe_experts.v1"]
    assert collectives(compiled) == ["all-reduce"]
    np.testing.assert_allclose(out, jax.jit(run_experts)(*operands), **F32_SUMS)


def whole_experts_keep_the_bits_of_tokens_that_are_split():
    operands = mixture()
    specs = specs_of("tp", None, None, operands)
    compiled, out = compiled_for(run_experts, make_mesh((1, 8)), operands, specs)
    assert collectives(compiled) == []
    assert targets(compiled) == ["jax_paged.moe_experts.v1"]
    assert_same(out, jax.jit(run_experts)(*operands))


def adapters_are_native_on_each_device():
    rng = np.random.default_rng(0)
    shapes = ((8, 64), (3, 16, 64), (3, 64, 8), (8, 64))
    x, a, b, base = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    operands = [x, a[:, :8], b, jnp.array([0, 1, 2, -1, 1, 1, 0, 5]), base]

    def add(x, a, b, adapters, base, **options):
        return lora(x, a, b, adapters, base=base, **options)

    expected = jax.jit(add)(*operands)
    for specs in (
        [P("dp"), P(), P(), P("dp"), P("dp")],
        [P(), P(), P(None, "tp"), P(), P(None, "tp")],
        [P("dp"), P(), P(None, "tp"), P("dp"), P("dp", "tp")],
    ):
        compiled, out = compiled_for(add, make_mesh((2, 4)), operands, specs)
        assert targets(compiled) == ["jax_paged.lora.v1"]
        assert collectives(compiled) == []
        assert_same(out, expected)


def inside_shard_map_results_vary_as_operands_do():
    """That is checked (check_vma), by types: of tokens, of experts, of what is added up."""
    x, weight = projection()
    operands = mixture()
    mesh = make_mesh((2, 4))

    def by_depth(x, weight, **options):
        return jax.lax.psum(linear(x, weight, out_dtype=jnp.float32, **options), "tp")

    def by_expert(x, gate_up, down, experts, *rest, **options):
        experts = experts - jax.lax.axis_index("tp") * down.shape[0]
        options["out_dtype"] = jnp.float32
        return jax.lax.psum(run_experts(x, gate_up, down, experts, *rest, **options), "tp")

    calls = [
        (linear, linear, (x, weight), (P("dp"), P("tp")), P("dp", "tp")),
        (by_depth, linear, (x, weight), (P("dp", "tp"), P(None, "tp")), P("dp")),
        (by_expert, run_experts, operands, specs_of("dp", "tp", None, operands), P("dp")),
        (run_experts, run_experts, operands, specs_of("dp", None, None, operands), P("dp")),
    ]
    for local, whole, given, specs, out_specs in calls:
        expected = jax.jit(whole)(*given)
        for implementation in ("native", "reference"):
            call = functools.partial(local, implementation=implementation)
            mapped = jax.shard_map(call, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs)
            np.testing.assert_allclose(jax.jit(mapped)(*given), expected, **F32_SUMS)


def explicit_mesh_axes_say_how_results_are_split():
    mesh = make_mesh((2, 4), axis_type=AxisType.Explicit)
    operands, given = projection(), mixture()
    calls = [
        (linear, operands, PROJECTIONS["tokens and depth"][:2], P("dp", None)),
        (linear, operands, PROJECTIONS["outputs and depth"][:2], P(None, "dp")),
        (run_experts, given, specs_of("dp", "tp", None, given), P("dp", None)),
    ]
    for function, arrays, specs, of_result in calls:
        types = []

        def call(*x, function=function, types=types):
            out = function(*x)
            types.append(jax.typeof(out).sharding.spec)
            return out

        out = compiled_for(call, mesh, arrays, specs)[1]
        assert types == [of_result]
        np.testing.assert_allclose(out, jax.jit(function)(*arrays), **F32_SUMS)
    out_of_line = place(mesh, operands, [P(), P(None, "tp")])
    message = r"x: expected to be split over devices by tokens or in alone, .*, got it whole"
    with pytest.raises(ValueError, match=message):
        jax.jit(linear).lower(*out_of_line)


def the_older_partitioner_splits_weights_too():
    jax.config.update("jax_use_shardy_partitioner", False)
    mesh, operands, given = make_mesh((2, 4)), projection(), mixture()
    for function, arrays, specs in (
        (linear, operands, PROJECTIONS["tokens and depth"][:2]),
        (run_experts, given, specs_of("dp", "tp", None, given)),
    ):
        compiled, out = compiled_for(function, mesh, arrays, specs)
        assert len(targets(compiled)) == 1
        assert collectives(compiled) == ["all-reduce"]
        np.testing.assert_allclose(out, jax.jit(function)(*arrays), **F32_SUMS)


def each_device_makes_its_own_part_of_a_pool_of_zeros():
    mesh = make_mesh((2, 4))
    make = functools.partial(zero_pool, (3, 4, 8, 16), jnp.dtype("bfloat16"))
    for spec in (P(None, None, "tp"), P(None, "dp", "tp"), P()):
        sharding = NamedSharding(mesh, spec)
        compiled = jax.jit(make, out_shardings=sharding).lower().compile()
        shape = ",".join(map(str, sharding.shard_shape((3, 4, 8, 16))))
        assert targets(compiled) == ["jax_paged.zero_pool.v1"]
        assert re.search(rf"ROOT \S+ = bf16\[{shape}\]\S* custom-call\(\)", compiled.as_text())
        assert not np.asarray(compiled(), np.float32).any()


def splits_that_would_gather_a_weight_are_refused():
    mesh = make_mesh((1, 8))
    operands = mixture()
    paired = [in_pairs(a) if i in (1, 5) else a for i, a in enumerate(operands)]
    a, b = jnp.zeros((2, 16, 32), jnp.float32), jnp.zeros((2, 64, 8), jnp.float32)

    def add_parts(x, a, b):
        return lora(x, a, b, jnp.zeros(8, jnp.int32), part_sizes=(32, 32))

    of_blocks = [jnp.zeros((8, 1024), jnp.float32), *quantize_blocks(np.ones((1024, 1024)))[:2]]
    by_experts = "expected to be split over devices by experts alone, as .*, got"
    by_either = "expected to be split over devices by experts or inner alone, as .*, got"
    hint = (
        r"gate_up may be \[experts, 2, inner, hidden\], whose inner axis splits like that of down"
    )
    split = P(None, None, "tp")
    refused = [
        (
            run_experts,
            operands,
            {1: split},
            f"gate_up: {by_experts} axis 2 split over 'tp', .*{hint}",
        ),
        (
            run_experts,
            operands,
            {1: P(None, "tp")},
            f"gate_up: {by_experts} axis 1 split over 'tp'",
        ),
        (run_experts, operands, {2: split}, f"down: {by_experts} axis 2 split over 'tp'"),
        (run_experts, operands, {1: P("tp")}, f"down: {by_experts} it whole"),
        (run_experts, paired, {1: split, 2: P(None, "tp")}, f"down: {by_either} axis 1 split over"),
        (run_experts, paired, {1: P(None, None, None, "tp")}, f"gate_up: {by_either} axis 3 split"),
        (project, of_blocks, {1: P("tp")}, "weight: expected to be whole on each device"),
        (add_parts, [operands[0], a, b], {1: P(None, "tp")}, "a: expected to be whole on each"),
        (
            add_parts,
            [operands[0], a, b],
            {2: P(None, "tp")},
            "b: .*; b may be split by its outputs",
        ),
    ]
    for function, given, changed, message in refused:
        specs = [changed.get(i, P()) for i in range(len(given))]
        program = jax.jit(function).lower(*place(mesh, given, specs))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            program.compile()


PROCESSES = {
    "projections": (
        linear_is_native_on_each_device,
        a_token_keeps_its_bits_whatever_its_batch_and_its_device,
        tokens_that_do_not_count_are_0_on_each_device,
        gradients_and_batches_of_a_split_weight_are_those_of_one_device,
    ),
    "experts": (
        experts_are_native_on_each_device,
        experts_whose_blocks_have_scales_split_by_expert,
        whole_experts_keep_the_bits_of_tokens_that_are_split,
        splits_that_would_gather_a_weight_are_refused,
    ),
    "others": (
        adapters_are_native_on_each_device,
        inside_shard_map_results_vary_as_operands_do,
        explicit_mesh_axes_say_how_results_are_split,
        each_device_makes_its_own_part_of_a_pool_of_zeros,
    ),
    "older partitioner": (the_older_partitioner_splits_weights_too,),
}
PROGRAMS = {program.__name__: program for programs in PROCESSES.values() for program in programs}


@pytest.mark.parametrize("process", first_of(PROCESSES, 3))
def test_on_eight_devices(process):
    names = (program.__name__ for program in PROCESSES[process])
    check_in_a_process(__file__, *names, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
