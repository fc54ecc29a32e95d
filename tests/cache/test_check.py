# SPDX-License-Identifier: Apache-2.0
"""jp.check: a status that nobody looks at does not go unseen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jax_paged as jp
from jax_paged import Status
from jax_paged.checks.status import _MEANING


def test_ok_is_silent():
    jp.check(jnp.zeros(3, jnp.int32))
    jp.check(np.int32(0))
    jp.check([])


def test_every_status_has_a_meaning():
    assert set(_MEANING) == set(Status) - {Status.OK}


@pytest.mark.parametrize("kind", _MEANING)
def test_the_error_names_row_and_status(kind):
    text = f"status: expected OK, got {kind.name} for row 12 ({_MEANING[kind]})"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        jp.check([0, int(kind), 0], rows=[7, 12, 9])


def test_all_rows_are_named_by_status():
    text = "got POOL_FULL for rows 1, 3 (no free page is left in the pool); BAD_ROW for row 0 ("
    with pytest.raises(ValueError, match=re.escape(text)):
        jp.check([3, 1, 0, 1])
    with pytest.raises(ValueError, match=r"got 99, which is no status, for row 0$"):
        jp.check([99])


def test_rows_must_match():
    with pytest.raises(ValueError, match=r"^rows: expected shape \[2\], got \[3\]$"):
        jp.check([0, 0], rows=[1, 2, 3])


def make_state():
    return jp.KVState.create(
        num_layers=1, num_pages=2, page_size=4, num_kv_heads=2, head_dim=8, max_seqs=4,
        pages_per_seq=2, dtype=jnp.float32,
    )  # fmt: skip


def step(state, rows, q, k, v):
    """A step with a check inside, as a program in the making has it."""
    state, status = state.reserve(rows, 1)
    jp.check(status, rows)
    state, batch, status = state.step(rows, 1)
    jp.check(status, rows)
    k_pages, v_pages = jp.write_kv(state.k_pages, state.v_pages, k, v, batch.slot_mapping, layer=0)
    out = jp.paged_attention(q, k_pages, v_pages, batch.page_table, batch.seq_lens, layer=0)
    return state.replace(k_pages=k_pages, v_pages=v_pages), out


def arrays(rows):
    heads = (jnp.ones((len(rows), heads, 8), jnp.float32) for heads in (4, 2, 2))
    return jnp.array(rows, jnp.int32), *heads


@pytest.mark.parametrize("donate", [None, "state"])
def test_under_jit_checkify_names_row_and_status(donate):
    checked = jax.jit(checkify.checkify(step), donate_argnames=donate)
    error, (state, _) = checked(make_state(), *arrays([3, 1]))
    assert error.get() is None
    error, _ = checked(state, *arrays([0, 2]))
    assert "got POOL_FULL for row 0 (no free page is left in the pool)" in error.get()
    with pytest.raises(Exception, match="status: expected OK, got POOL_FULL for row 0"):
        error.throw()


def test_without_checkify_a_program_has_nothing_of_it(monkeypatch):
    with_checks = jax.jit(step).lower(make_state(), *arrays([3, 1])).as_text()
    monkeypatch.setattr(jp, "check", lambda *_: None)
    without = jax.jit(lambda *args: step(*args))
    without = without.lower(make_state(), *arrays([3, 1])).as_text().replace("_lambda", "_step")
    count = [text.count("custom_call") for text in (with_checks, without)]
    assert "callback" not in with_checks
    assert count[0] == count[1] > 0


def test_in_a_loop():
    def loop(table):
        def body(table, _):
            table, status = table.reserve(jnp.arange(2), 4)
            jp.check(status)
            table, _, status = table.step(jnp.arange(2), 4, num_tokens=8)
            return table, status

        return jax.lax.scan(body, table, None, length=3)

    table = jp.PageTable.create(4, 2, pages_per_seq=4, page_size=4)
    error, _ = jax.jit(checkify.checkify(loop))(table)
    assert "got POOL_FULL for row 0" in error.get()
