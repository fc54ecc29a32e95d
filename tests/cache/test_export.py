# SPDX-License-Identifier: Apache-2.0
"""Exported programs that take states: serialised, loaded elsewhere, same bits."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

import jax_paged as jp
from jax_paged import transfer
from jax_paged.cache import export as _export

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")

SIZES = {
    "num_pages": 8, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "max_seqs": 4,
    "pages_per_seq": 2, "dtype": jnp.float32,
}  # fmt: skip


def make_state(**options):
    return jp.KVState.create(**SIZES, num_layers=2, **options)


def step(state, rows, q, k, v):
    state, status = state.reserve(rows, 1)
    state, batch, _ = state.step(rows, 1)
    k_pages, v_pages = jp.write_kv(state.k_pages, state.v_pages, k, v, batch.slot_mapping, layer=1)
    out = jp.paged_attention(q, k_pages, v_pages, batch.page_table, batch.seq_lens, layer=1)
    return state.replace(k_pages=k_pages, v_pages=v_pages), out, status


def operands():
    rng = np.random.default_rng(0)
    heads = [rng.standard_normal((3, heads, 8), np.float32) for heads in (4, 2, 2)]
    return np.array([2, 0, 1], np.int32), *heads


LOAD = """\
import jax, numpy as np
import jax_paged as jp
state = jp.KVState.create(num_layers=2, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8,
                          max_seqs=4, pages_per_seq=2, dtype="float32")
given = np.load("operands.npz")
program = jax.export.deserialize(bytearray(open("program", "rb").read()))
state, out, status = program.call(state, *(given[name] for name in given))
assert state.table.page_size == 4 and state.layout == "HND"
jp.check(status)
np.save("out", out)
"""


@pytest.mark.parametrize("donate", first_of(["state", None], 1))
def test_another_process_runs_a_program_on_a_state(tmp_path, donate):
    jitted = jax.jit(step, donate_argnames=donate)
    program = jp.export(jitted)(make_state(), *operands()).serialize()
    (tmp_path / "program").write_bytes(program)
    np.savez(tmp_path / "operands", *operands())
    run = subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    _, out, _ = jitted(make_state(), *operands())
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), out)


STATES = {
    "KVState": make_state,
    "8-bit": lambda: jp.KVState.create(**SIZES | {"dtype": jnp.int8}, num_layers=2),
    "windows": lambda: make_state(windows=True),
    "PageTable": lambda: make_state().table,
    "StepBatch": lambda: make_state().step(jnp.arange(4), 1)[1],
}


@pytest.mark.parametrize("name", STATES)
def test_every_part_of_a_state_comes_back_as_it_is(name):
    state = STATES[name]()
    same = jax.export.deserialize(jp.export(jax.jit(lambda x: x))(state).serialize())
    back = same.call(state)
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_every_registered_dataclass_can_be_serialised():
    modules = [module for name, module in sys.modules.items() if name.startswith("jax_paged")]
    ours = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__.startswith("jax_paged.")
        and not kind.__module__.startswith(("jax_paged.models", "jax_paged.testing"))
        and dataclasses.is_dataclass(kind) and _is_node(kind)
    }  # fmt: skip
    assert ours == set(_export.TYPES)
    assert transfer.Inbox in ours


def _is_node(kind) -> bool:
    empty = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(empty, field.name, 0)
    return not jax.tree_util.all_leaves([empty])
