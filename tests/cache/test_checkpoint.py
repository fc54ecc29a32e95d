# SPDX-License-Identifier: Apache-2.0
"""A KVState survives orbax: saved as the pytree that it is, restored and used further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged as jp
from jax_paged import KVState

ocp = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")


def make(dtype, **changes) -> KVState:
    return KVState.create(
        num_layers=2, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8, max_seqs=3,
        pages_per_seq=4, dtype=dtype, windows=True, **changes,
    )  # fmt: skip


def append(kv: KVState, rows, q_lens, seed: int) -> KVState:
    kv, status = kv.reserve(rows, q_lens)
    assert not status.any()
    kv, batch, _ = kv.step(rows, q_lens, num_tokens=16)
    k = jax.random.normal(jax.random.key(seed), (16, 2, 8), jnp.float32)
    scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale} if kv.k_scale is not None else {}
    pools = jp.write_kv(kv.k_pages, kv.v_pages, k, -k, batch.slot_mapping, layer=1, **scales)
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    return kv.replace(**dict(zip(names, pools, strict=False)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_state_saved_by_orbax_comes_back_and_goes_on(dtype, tmp_path):
    kv = append(make(dtype), [0, 1], [7, 3], seed=0)
    kv, _ = kv.fork([0], [2], 5)
    kv, _ = kv.set_window([1], 4, 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", kv)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: make(dtype)))
    assert jax.tree.structure(again) == jax.tree.structure(kv)
    states = [append(x, [1, 0], [4, 2], seed=1) for x in (kv, again)]
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
