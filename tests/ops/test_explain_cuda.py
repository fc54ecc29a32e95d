# SPDX-License-Identifier: Apache-2.0
"""explain tells which CUDA kernels serve a call: asked of the planner, where it runs."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import explain
from jax_paged.layout import LAYOUTS
from jax_paged.ops.rope import Rope
from jax_paged.testing import Case, make_batch
from jax_paged.testing.mla import make_mla
from jax_paged.testing.options import eight_bit

CASE = Case("explained", 8, 2, 64)


@pytest.fixture(params=["emulated", pytest.param("sim", marks=pytest.mark.sim)])
def how(request):
    """The implementation: CUDA kernels without a GPU."""
    importlib.import_module({"emulated": "emulation", "sim": "simulation"}[request.param])
    return request.param


def ragged(batch, **options):
    arguments, defaults = batch.ragged()
    return explain("ragged_paged_attention", *arguments, **defaults | options)


def test_rows_are_told_apart(how):
    batch = make_batch(CASE, jnp.bfloat16, [1, 60, 0, 1, 2], [3000, 60, 40, 0, 70])
    plan = ragged(batch, implementation=how)
    assert plan["decode_kernel"] == "decode"
    assert plan["prefill_kernel"] == "prefill"
    assert plan["kernels"] == ["decode", "prefill", "empty", "empty", "decode"]
    assert plan["kv_splits"][0] >= 1
    assert [n > 0 for n in plan["kv_splits"]] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("option", "splits"), [({"num_kv_splits": 3}, 3), ({"split_tokens": 512}, 6)]
)
def test_fixed_splits_are_told(how, option, splits):
    batch = make_batch(CASE, jnp.float16, [1], [3000])
    plan = ragged(batch, implementation=how, **option)
    assert plan["kv_splits"] == [splits]


def test_masses_are_told_page_by_page(how):
    batch = make_batch(CASE, jnp.bfloat16, [1, 1], [40, 0])
    q, k_pages, _, *rows = batch.operands()
    plan = explain("page_attention_mass", q, k_pages, *rows, implementation=how)
    assert plan["decode_kernel"] == "decode"
    filled = -(-40 // batch.case.page_size)
    assert plan["kernels"] == ["decode"] * filled + ["empty"] * (rows[0].size - filled)


def test_shapes_alone_tell_the_kernels(how):
    batch = make_batch(CASE, jnp.bfloat16, [1, 60], [40, 60])
    arguments, options = batch.ragged()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    plan = explain("ragged_paged_attention", *shapes, **options, implementation=how)
    assert (plan["decode_kernel"], plan["prefill_kernel"]) == ("decode", "prefill")
    assert "kernels" not in plan


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("case", "dtype", "options", "kernels"),
    [
        ({}, "float32", {}, ("simt", "simt")),
        ({"head_dim": 40, "v_head_dim": 24}, "bfloat16", {}, ("decode", "prefill")),
        ({"head_dim": 264}, "bfloat16", {}, ("simt", "simt")),
        ({}, "float16", {"rope": 64}, ("decode", "prefill")),
        ({}, "float16", {"rope": 6}, ("simt", "simt")),  # an odd number of angles
        ({}, "float16", {"max_q_len": 1}, ("decode", "decode")),
        ({}, "bfloat16", {"kv": "int8"}, ("decode", "prefill")),
    ],
)  # fmt: skip
def test_each_path_is_told(how, case, dtype, options, kernels, layout):
    batch = make_batch(dataclasses.replace(CASE, layout=layout, **case), jnp.dtype(dtype),
                       [1, 20], [30, 20])  # fmt: skip
    options = dict(options)
    if kv := options.pop("kv", None):
        batch, _, options = eight_bit(batch, kv, "head", np.random.default_rng(0))
        kernels = ("simt", "simt") if layout == "vllm5d" else kernels
    if dims := options.pop("rope", None):
        tables = jnp.ones((32, dims // 2), jnp.float32)
        options["rope"] = Rope(tables, tables)
    plan = ragged(batch, implementation=how, **options)
    assert (plan["decode_kernel"], plan["prefill_kernel"]) == kernels
    assert plan["kernels"] == list(kernels)


def test_latent_rows_are_told(how):
    batch = make_mla(64, 48, 20, [1, 30], [270, 40], dtype="bfloat16")
    q, pages, table, lens, bounds = (
        jnp.asarray(x)
        for x in (batch.q, batch.k_pages[:, 0], batch.page_table, batch.seq_lens, batch.cu_q_lens)
    )
    options = {"sm_scale": 1.0, "v_head_dim": 48, "implementation": how}
    plan = explain("mla_paged_attention", q, pages, table, lens, bounds, **options)
    assert (plan["decode_kernel"], plan["prefill_kernel"]) == ("latent", "latent")
    assert plan["kernels"] == ["latent", "latent"]
    wide = q.astype(jnp.float32), pages.astype(jnp.float32)
    plan = explain("mla_paged_attention", *wide, table, lens, bounds, **options)
    assert plan["kernels"] == ["simt", "simt"]


def test_a_call_over_keys_without_pages_is_told(how):
    q, k = jnp.ones((41, 8, 64), jnp.bfloat16), jnp.ones((90, 2, 64), jnp.bfloat16)
    bounds = jnp.array([0, 1, 41]), jnp.array([0, 40, 90])
    plan = explain("ragged_attention", q, k, k, *bounds, implementation=how)
    assert plan["kernels"] == ["decode", "prefill"]
