# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of qkv_norm_rope_write in the emulator (ffi/emu): orders and planted bugs.

tests/ops/test_qkv_norm_rope_write.py asks of all implementations, and so of this kernel, what the
op should do.
"""

import dataclasses
import subprocess

import emulation
import numpy as np
import pytest
from emulation import MACHINE, Device, EmulationError, library, open_library, poisoned
from planting import COMPILE, plant

from jax_paged.layout import pages_shape
from jax_paged.ops.write import cuda_workspace_words
from jax_paged.testing.qkv import check_results, make_call

I32_MAX = 2**31 - 1


def emulate(call, seed=1, loaded=None):
    """(q, k_pages, v_pages, and pools of scales) of the CUDA kernel; raises EmulationError.

    A scale that is given is [num_kv_heads].
    """
    names = (
        "qkv", "k_pages", "v_pages", "k_scale", "v_scale", "positions", "slot_mapping", "cos",
        "sin", "q_norm", "k_norm",
    )  # fmt: skip
    nothing = np.zeros(0, np.float32)
    operands = {name: nothing if (x := getattr(call, name)) is None else x for name in names}
    operands["layer"] = np.array(0 if call.layer is None else call.layer, np.int32)
    attributes = {"eps": call.eps, "style": call.style, "layout": call.layout}
    head_dim = pages_shape(call.k_pages, call.layout).head_dim
    results = {
        "q": poisoned((len(call.qkv), call.num_q_heads, head_dim), call.qkv.dtype),
        "k_pages": call.k_pages.copy(),
        "v_pages": call.v_pages.copy(),
        "k_scale": call.k_scale.copy() if call.per_token else nothing,
        "v_scale": call.v_scale.copy() if call.per_token else nothing,
    }
    workspace = poisoned((cuda_workspace_words(len(call.qkv)),), np.int32)
    emulation.call(
        "qkv_norm_rope_write", operands, attributes, results | {"workspace": workspace},
        device=Device(seed=seed), loaded=loaded,
    )  # fmt: skip
    return tuple(results.values())[: 5 if call.per_token else 3]


def test_the_workspace_that_python_asks_for_is_what_the_kernels_need():
    for tokens in (0, 1, 2, 3, 2048, 2049, 4096, 4097, 10**6, 2**30 - 1):
        assert cuda_workspace_words(tokens) == library().write_kv_workspace_words(tokens)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8", "scale": "token"}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_ctas_and_warps_does_not_matter(seed, options):
    call = make_call("float16", 64, heads=(9, 4), tokens=40, page_size=2, seed=4, **options)
    slots = np.random.default_rng(0).integers(-1, 12, 40).astype(np.int32)
    call = dataclasses.replace(call, slot_mapping=slots)
    for got, expected in zip(emulate(call, seed=seed), emulate(call, seed=99), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_a_missing_barrier_is_found():
    loaded, call = library(), make_call("bfloat16", 64, heads=(9, 4), tokens=9)
    loaded.take_sites()
    emulate(call)
    sites = loaded.take_sites().decode().split()
    assert len(sites) == 2
    assert sites[0] == "SyncThreads"
    loaded.skip_site(sites[1].encode())
    try:
        with pytest.raises(EmulationError, match=r"race|nobody has written"):
            emulate(call)
    finally:
        loaded.skip_site(b"")


# What stands in the kernel, what the bug makes of it, what must be said about it.
BUGS = {
    "slot not checked": (
        "args.pools[0].slots.IsSlot(layer, slot)", "(slot != -1)", "_pages out of bounds",
    ),
    "position not checked": (
        "position < args.tokens.max_positions;", "true;", "(cos|sin) out of bounds",
    ),
    "tokens of one slot both written": (
        " &&\n             !IsOverwritten<kQkvThreads>(args.tokens, token, slot)", "",
        "race: write after write",
    ),
    "V in the place of K": ("args.pools[is_v ? 1 : 0]", "args.pools[0]", "race"),
    "mean over half of the lanes": (
        "args.lanes_per_head / 2; mask", "args.lanes_per_head / 4; mask", r"q\(|k at page",
    ),
    "largest of half of the lanes": (
        "= lanes_per_head / 2; mask", "= lanes_per_head / 4; mask", "[kv] at page",
    ),
    "elements of an atom taken as neighbours": (
        "> 1 ? atom : 0", "> 1 ? 0 : 0", "_pages misaligned",
    ),
    "scale of all lanes": ("if (lane == 0) prim::Store", "prim::Store", "race"),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug, tmp_path):
    old, new, message = BUGS[bug]
    plant(tmp_path, "cuda/qkv_norm_rope_write/kernel.cuh", old, new)
    flags = [*COMPILE, "-O0", "-I", tmp_path / "ffi"]
    sources = [tmp_path / "ffi/emu" / name for name in ("qkv_norm_rope_write.cc", *MACHINE)]
    subprocess.run(["g++", *flags, "-shared", *sources, "-o", tmp_path / "bug.so"], check=True)
    loaded = open_library(tmp_path / "bug.so")
    slots = np.array([29, 30, -1, 4, 5, 4, I32_MAX, 0, 1], np.int32)
    positions = np.array([0, 10, 1, 2, 3, 4, 5, 11, -1], np.int32)

    def check_all(loaded=None):
        for options in ({}, {"kv_dtype": "int8", "scale": "token", "layout": "vllm5d"}):
            call = make_call("bfloat16", 64, heads=(9, 4), tokens=9, num_layers=2, **options)
            call = dataclasses.replace(call, slot_mapping=slots, positions=positions)
            check_results(call, emulate(call, loaded=loaded))

    check_all()
    with pytest.raises((EmulationError, AssertionError), match=message):
        check_all(loaded)
