# SPDX-License-Identifier: Apache-2.0
"""explain tells what a call would do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged
from jax_paged import explain, page_attention_mass, paged_attention, ragged_paged_attention
from jax_paged.layout import LAYOUTS
from jax_paged.testing import Case, make_batch

CASE = Case("explained", 8, 2, 64, num_layers=2)


def ragged(**options):
    """explain for a batch of decode, prefill and empty rows."""
    batch = make_batch(CASE, jnp.float32, [1, 60, 0, 1], [5000, 60, 40, 0])
    arguments, defaults = batch.ragged()
    return explain("ragged_paged_attention", *arguments, **defaults | options)


def test_a_native_call_names_its_kernels_and_splits():
    plan = ragged()
    assert plan["op"] == "ragged_paged_attention"
    assert plan["platform"] == "cpu"
    assert plan["implementation"] == "native"
    assert plan["target"] == "jax_paged.attention.v1"
    assert plan["isa"] == jax_paged.build_info()["cpu"]["isa"]
    assert plan["kernels"] == ["decode", "prefill", "empty", "empty"]
    assert len(plan["kv_splits"]) == 4
    assert plan["num_threads"] >= 1


def test_the_split_options_show_in_the_plan():
    assert ragged(num_kv_splits=1)["kv_splits"][0] == 1
    assert ragged(num_kv_splits=4)["kv_splits"][0] == 4
    assert ragged(split_tokens=512)["kv_splits"][0] == 10


def test_the_function_itself_serves_as_name():
    batch = make_batch(CASE, jnp.float32, [1, 1], [40, 9])
    plan = explain(paged_attention, *batch.operands(), layer=0)
    assert plan["op"] == "paged_attention"
    assert plan["kernels"] == ["decode", "decode"]


def test_shapes_alone_tell_all_but_the_split():
    batch = make_batch(CASE, jnp.float32, [1, 1], [40, 9])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch.operands()]
    plan = explain("paged_attention", *shapes, layer=0)
    assert plan["implementation"] == "native"
    assert "kv_splits" not in plan


def test_the_layout_is_read_as_the_op_reads_it():
    sizes = {"q_lens": [1, 60], "seq_lens": [5000, 60]}
    plans = []
    for layout in LAYOUTS:
        case = dataclasses.replace(CASE, layout=layout, v_head_dim=32)
        arguments, options = make_batch(case, jnp.bfloat16, **sizes).ragged()
        plans.append(explain(ragged_paged_attention, *arguments, **options))
    assert plans[0]["kernels"] == ["decode", "prefill"]
    assert plans == [plans[0]] * len(LAYOUTS)


def test_masses_are_explained_page_by_page():
    batch = make_batch(dataclasses.replace(CASE, page_size=16), jnp.float32, [1, 1], [40, 9])
    q, k_pages, _, table, seq_lens = batch.operands()
    windows = ({}, {"sliding_window": 8}, {"sliding_window": 12, "num_pinned": 4})
    for window, filled in zip(windows, ([3, 1], [1, 1], [2, 1]), strict=True):
        options = window | {"layer": 0, "soft_cap": 2.0, "sinks": jnp.ones(8, jnp.float32)}
        plan = explain(page_attention_mass, q, k_pages, table, seq_lens, **options)
        rows = np.reshape(plan["kernels"], table.shape)
        assert (rows == "decode").sum(1).tolist() == filled
        assert (rows == "empty").sum(1).tolist() == [table.shape[1] - n for n in filled]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_pages, table, seq_lens)]
    plan = explain("page_attention_mass", *shapes, layer=0, sliding_window=8)
    assert (plan["implementation"], plan["op"]) == ("native", "page_attention_mass")
    assert "kernels" not in plan


def test_the_reference_has_no_target():
    plan = ragged(implementation="reference")
    assert plan["implementation"] == "reference"
    assert plan["target"] is None
    assert "isa" not in plan


def test_a_page_write_is_explained():
    pages = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((3, 2, 64), jnp.float32)
    plan = explain("write_kv", pages, pages, new, new, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert plan["implementation"] == "native"
    assert plan["target"] == "jax_paged.write_kv.v1"


def test_a_wrong_call_gets_the_error_of_the_op():
    batch = make_batch(CASE, jnp.float32, [1, 1], [40, 9])
    with pytest.raises(ValueError, match="layer: expected an i32 scalar for stacked pages"):
        explain("paged_attention", *batch.operands())
    with pytest.raises(ValueError, match=r"op: expected paged_attention or .*, got paged_atention"):
        explain("paged_atention", *batch.operands())


def test_wild_values_are_explained_as_the_op_takes_them():
    batch = make_batch(CASE, jnp.float32, [1, 3], [40, 9])
    (*arrays, seq_lens, _, _), options = batch.ragged()
    wild = jnp.asarray(np.array([2**31 - 1, -5], np.int32))
    bounds = jnp.asarray(np.array([0, 1, 900], np.int32))
    plan = explain(ragged_paged_attention, *arrays, wild, bounds, **options)
    assert plan["kernels"] == ["decode", "empty"]
    plan = explain(ragged_paged_attention, *arrays, seq_lens, bounds, -1, **options)
    assert plan["kernels"] == ["empty", "empty"]
