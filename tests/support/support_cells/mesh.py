# SPDX-License-Identifier: Apache-2.0
"""Attention over two devices, each with half of the heads: the checks of `attention`.

They run in a process of their own (this file as a script), because the number of devices is fixed
when JAX starts. It prints what became of each feature.
"""

import functools
import json
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from children import on_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_paged as jp
from jax_paged.layout import kv_heads_axis
from support_cells.attention import LAYOUT, RUNS, Here, check_cascade, check_latent, check_paged
from support_cells.kinds import Cell, together
from support_cells.stored import DIM, HEADS, WIDTH, WINDOW, Known, append


class OnMesh(Here):
    """Operands split over two devices by heads, as far as they have any."""

    implementations = ("native",)

    def __init__(self, layout: Any = "HND"):
        self._mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
        self._layout = layout

    def place(self, name: str, array: Any) -> Any:
        array = super().place(name, array)
        axis = {"q": 1, "alibi_slopes": 0, "sinks": 0}.get(name)
        if name in ("k_pages", "v_pages"):
            axis = kv_heads_axis(array, self._layout, "k" if name[0] == "k" else "v")
        if name in ("k_scale", "v_scale") and array.ndim >= 3:  # per token
            axis = array.ndim - 2
        if axis is None:
            return array
        return jax.device_put(array, NamedSharding(self._mesh, P(*[None] * axis, "tp")))

    def check(self, out: jax.Array) -> None:
        shares = {shard.data.shape for shard in out.addressable_shards}
        assert shares == {(out.shape[0], out.shape[1] // 2, *out.shape[2:])}, shares


def check_groups() -> None:
    """A state of two groups made on the mesh, written and read there."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    sizes = {"layer_kinds": ("full", WINDOW)}
    alone, many = (Known("groups", **sizes, **more).state for more in ({}, {"mesh": mesh}))
    rng, results = np.random.default_rng(0), []
    q, k, v = (rng.standard_normal((WIDTH, n, DIM)).astype("f4") for n in (4, HEADS, HEADS))
    for state in (alone, many):
        ids = np.array([0, 1], np.int32), np.array([3, 5], np.int32)
        state, batch, status = append(state, *ids)
        jp.check(status)
        for layer in (0, 1):
            state = jp.write(jnp.asarray(k), jnp.asarray(v), state, batch, layer=layer)
            results.append(jp.attend(jnp.asarray(q), state, batch, layer=layer))
    for group in state.groups:  # of the mesh
        assert {x.data.shape[2] for x in group.k_pages.addressable_shards} == {HEADS // 2}
    for one, other in zip(results[:2], results[2:], strict=True):
        OnMesh().check(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def checks() -> dict[str, Any]:
    """The checks, by the names of their runs."""
    ragged = partial(check_paged, jp.ragged_paged_attention)
    found = {run: partial(ragged, run, OnMesh(LAYOUT[run])) for run in RUNS}
    found["cascade"] = partial(check_cascade, "windows", OnMesh())
    found["latent"] = partial(check_latent, "plain", OnMesh())
    found["groups"] = check_groups
    return found


@functools.cache
def outcomes() -> dict[str, str]:
    """What each check said in a process with two devices; "" where it passed."""
    child = subprocess.run(
        [sys.executable, "-W", "error", __file__], env=on_devices(2), timeout=240,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


def check(run: str) -> None:
    """A check passed there."""
    assert not outcomes()[run], outcomes()[run]


def rows() -> dict[str, dict[str, Cell]]:
    """The row of attention and states over several devices."""
    alone = {f: (f,) for f in ("cascade", "latent", "groups")}
    return {"mesh": together(check, RUNS | alone)}


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == 2
    said = {}
    for run, check_it in checks().items():
        try:
            check_it()
            said[run] = ""
        except Exception:
            said[run] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
