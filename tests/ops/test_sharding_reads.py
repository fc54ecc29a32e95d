# SPDX-License-Identifier: Apache-2.0
"""Every other op that has heads, split by them over 2, 4 and 8 devices: the bits of one device.

Under plain jit and inside shard_map, which checks what varies over which devices. The programs run
in a process of their own (this file as a script).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import (
    assert_same,
    check_in_a_process,
    collectives,
    make_mesh,
    place,
    run_chosen,
    targets,
)
from split_heads import CALLS, IN_SHARD_MAP

DEVICES = 8


def check(name, tp, is_mapped):
    call, operands, specs, out_specs, used = CALLS[name]()
    operands = [jnp.asarray(x) for x in operands]
    expected = jax.jit(call)(*operands)
    mesh = make_mesh((tp,), ("tp",))
    if is_mapped:
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs)
    placed = place(mesh, operands, specs)
    compiled = jax.jit(call).lower(*placed).compile()
    assert sorted(targets(compiled)) == sorted(used), name
    assert collectives(compiled) == [], name
    results = compiled(*placed)
    if name.startswith("latent"):  # the heads of a device are one tile: its size rounds otherwise
        pool, *attended = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        np.testing.assert_array_equal(*pool)
        for a, b in attended:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    else:
        assert_same(results, expected)


def check_all(tp, is_mapped):
    for name in IN_SHARD_MAP if is_mapped else CALLS:
        check(name, tp, is_mapped)


PROGRAMS = {
    f"{kind}_{tp}": functools.partial(check_all, tp, kind == "shard_map")
    for kind in ("plain_jit", "shard_map")
    for tp in (2, 4, 8)
}
DEFAULT = ("shard_map_4",)


@pytest.mark.parametrize(
    "program", [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.deep) for x in PROGRAMS]
)
def test_ops_split_by_heads_need_nothing_of_each_other(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
