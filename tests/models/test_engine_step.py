# SPDX-License-Identifier: Apache-2.0
"""The engine's device side: an order that the page table refuses is never passed over."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_paged import KVState
from jax_paged.models.serving.step import EngineState, PageOrders, StepPlan, keep


def device_and_orders():
    state = KVState.create(
        num_layers=1, num_pages=6, page_size=4, num_kv_heads=1, head_dim=8, max_seqs=3,
        pages_per_seq=3, dtype="float32", windows=True,
    )  # fmt: skip
    return EngineState.create(state, 5), PageOrders.create(state.table, 4)


def test_orders_that_fit_are_carried_out():
    device, orders = device_and_orders()
    orders.adopt_rows[0], orders.adopt_tokens[0] = 1, 5
    device = keep(device, orders.packed())
    assert not device.failed
    assert device.state.table.is_live.tolist() == [False, True, False]
    assert int(device.state.table.num_free) == 4


# Which order nobody can carry out: fields, values, and the window that rows get.
REFUSED = {
    "hold": ({"hold_rows": 0, "hold_columns": 0, "hold_entries": 0}, None),
    "release": ({"release_rows": 2}, None),
    "reserve": ({"adopt_rows": 0, "adopt_tokens": 13}, None),
    "set_window": ({"adopt_rows": 0, "adopt_tokens": 1}, (3, 3)),
    "swap": ({"adopt_rows": 0, "adopt_tokens": 4, "had_tokens": 5}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_is_refused_fails_the_device(name):
    device, orders = device_and_orders()
    values, window = REFUSED[name]
    for field, value in values.items():
        getattr(orders, field)[0] = value
    assert keep(device, orders.packed(), window=window).failed


@pytest.mark.parametrize("name", ["evict", "adopt"])
def test_a_page_that_is_not_held_can_be_neither_evicted_nor_adopted(name):
    device, orders = device_and_orders()
    device = dataclasses.replace(device, entry_pages=np.array([-1, -1, 3, -1, -1, -1], np.int32))
    if name == "evict":
        orders.evict_entries[0] = 2
    else:
        orders.adopt_rows[0], orders.adopt_entries[0, 0] = 1, 2
    assert keep(device, orders.packed()).failed


def test_what_is_packed_holds_each_bit():
    rng = np.random.default_rng(0)

    def filled(x):
        noise = rng.integers(0, 256, x.nbytes, np.uint8)
        return noise % 2 == 1 if x.dtype == np.bool_ else noise.view(x.dtype).reshape(x.shape)

    mask = np.arange(6, dtype=np.uint32).reshape(3, 2)
    plan = jax.tree.map(filled, StepPlan.create(3, 7, None))
    plan = dataclasses.replace(plan, edits=dataclasses.replace(plan.edits, mask=mask))
    device, orders = device_and_orders()
    orders = jax.tree.map(filled, orders)
    table = device.state.table
    got = jax.jit(lambda a, b: (a.plan(), b.orders(table)))(plan.packed(), orders.packed())
    assert jax.tree.structure(got) == jax.tree.structure((plan, orders))
    for x, y in zip(*map(jax.tree.leaves, (got, (plan, orders))), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == y.tobytes()
