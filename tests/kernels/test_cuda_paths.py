# SPDX-License-Identifier: Apache-2.0
"""Which CUDA kernel serves which call: a walk over the table of what is supported.

Tensor-core kernels serve every call but those that docs/support.md lists, each with its reason.
The emulator asks what the launches ask (select.h, latent_traits.h).
"""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import Device, emulate, emulate_mla, limits
from tiers import first_of

from jax_paged.layout import LAYOUTS
from jax_paged.ops.rope import Rope
from jax_paged.testing import Case, make_batch
from jax_paged.testing.mla import eight_bit as eight_bit_rows
from jax_paged.testing.mla import make_mla
from jax_paged.testing.options import eight_bit

SUPPORT = Path(__file__).resolve().parents[2] / "docs/support.md"
HEAD_DIMS = [(d, d) for d in (8, 32, 64, 72, 80, 96, 112, 128, 136, 192, 256, 264)]
HEAD_DIMS += [(192, 128), (40, 16), (64, 128), (192, 320)]  # of K and V
DTYPES = ["bfloat16", "float16", "float32"]
CALLS = [("bfloat16", (256, 256)), ("float16", (40, 16)), ("float32", (8, 8))]
CALLS += [x for x in itertools.product(DTYPES, HEAD_DIMS) if x not in CALLS]
# Why the SIMT kernel serves a call, as docs/support.md words it.
F32 = "q in f32"
HEAD_DIM = "head_dim of K or V above 256 (MLA excepted)"
ROPE_BYTES = "`rope` inside attention with 8-bit pages"
ROPE_ODD = "`rope` inside attention whose rotary_dim is no multiple of 4"
PAGES = 'pages of layout "vllm5d" whose size is no multiple of 8'
BYTES = "8-bit pages whose head_dim is no multiple of 16"
BYTES_5D = '8-bit pages of layout "vllm5d"'
EDITED_5D = 'token trees or pinned tokens with layout "vllm5d"'
EDITED_256 = "token trees or pinned tokens with 8-bit pages of head_dim above 192"
MLA_V = "MLA whose V is wider than 512"
MLA_LOGITS = "MLA with trees, pinned tokens, soft_cap or ALiBi"
MLA_BYTES = "MLA with 8-bit rows whose length is no multiple of 16"
REASONS = (
    F32,
    HEAD_DIM,
    ROPE_BYTES,
    ROPE_ODD,
    PAGES,
    BYTES,
    BYTES_5D,
    EDITED_5D,
    EDITED_256,
    MLA_V,
    MLA_LOGITS,
    MLA_BYTES,
)
OPTIONS = ("plain", "window", "pins", "tree", "soft_cap", "alibi", "sinks", "rope", "odd rope")
OPTIONS += ("fp8 output",)


def options_of(name, heads, head_dim):
    """The named option for two rows of one query each, the second of 20 tokens."""
    tables, odd = (jnp.ones((32, half), jnp.float32) for half in (head_dim // 2, 3))
    return {
        "plain": {},
        "window": {"sliding_window": 7},
        "pins": {"sliding_window": 7, "num_pinned": np.int32([2, 2])},
        "tree": {"tree": np.int32([[[0, 1]], [[0, 1]]]), "tree_sizes": np.int32([1, 1])},
        "soft_cap": {"soft_cap": 3.0},
        "alibi": {"alibi_slopes": np.ones(heads, np.float32)},
        "sinks": {"sinks": np.zeros(heads, np.float32)},
        "rope": {"rope": Rope(tables, tables)},
        "odd rope": {"rope": Rope(odd, odd)},
        "fp8 output": {"out_dtype": jnp.dtype("float8_e4m3fn")},
    }[name]


def path_of(chosen):
    """ "decode", "latent" or "simt", and whether tensor cores take rows with many queries."""
    path = "decode" if chosen["chosen_stages"] else "simt"
    return "latent" if chosen["chosen_latent_rows"] else path, chosen["chosen_prefill_rows"] > 0


def simt_reason(dtype, head_dim, v_head_dim, layout, page_size, is_eight_bit, option):
    """The first reason why a call is for the SIMT kernel, or None."""
    is_edited, widest = option in ("pins", "tree"), max(head_dim, v_head_dim)
    reasons = {
        F32: dtype == "float32",
        HEAD_DIM: widest > 256,
        ROPE_BYTES: is_eight_bit and "rope" in option,
        ROPE_ODD: option == "odd rope",
        PAGES: layout == "vllm5d" and page_size % 8,
        BYTES: is_eight_bit and (head_dim % 16 or v_head_dim % 16),
        BYTES_5D: layout == "vllm5d" and is_eight_bit,
        EDITED_5D: is_edited and layout == "vllm5d",
        EDITED_256: is_edited and is_eight_bit and widest > 192,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@pytest.mark.parametrize(("dtype", "head_dims"), first_of(CALLS, 3))
def test_calls_are_on_tensor_cores_but_for_reasons_that_are_listed(dtype, head_dims):
    head_dim, seen = head_dims[0], set()
    for option, layout, page_size, is_eight_bit, kib in itertools.product(
        OPTIONS, LAYOUTS, (16, 12), (False, True), (228, 164, 100)
    ):
        if is_eight_bit and layout == "vllm5d" and head_dim % 16:
            continue  # no such pages
        v_head_dim = head_dim if layout == "rpa" else head_dims[1]
        case = Case("path", 4, 2, head_dim, page_size, layout=layout, v_head_dim=v_head_dim)
        batch = make_batch(case, jnp.dtype(dtype), [1, 9], [3, 20])
        options = options_of(option, 4, head_dim)
        if is_eight_bit:
            batch, _, scales = eight_bit(batch, "int8", "head", np.random.default_rng(0))
            options |= scales
        chosen = {}
        emulate(batch, Device(**limits(kib), num_workers=2, stages=2), buffers=chosen, **options)
        given = dtype, head_dim, v_head_dim, layout, page_size, is_eight_bit, option
        reason = simt_reason(*given)
        seen.add(reason)
        expected = "decode" if reason is None else "simt", reason is None
        assert path_of(chosen) == expected, (given, kib, reason)
    assert seen & {None, F32, HEAD_DIM}


@pytest.mark.parametrize("dtype", first_of(DTYPES, 1))
def test_mla_is_on_tensor_cores_but_for_reasons_that_are_listed(dtype):
    options = [name for name in OPTIONS if "rope" not in name]
    for option, (width, v_dim), is_eight_bit, kib in itertools.product(
        options, [(576, 512), (64, 64), (40, 32), (576, 576)], (False, True), (228, 164, 100)
    ):
        batch, scale = make_mla(width, v_dim, 16, [1, 1], [3, 20], dtype=dtype), None
        if is_eight_bit:
            scale = np.float32(0.03)
            batch, _ = eight_bit_rows(batch, "int8", scale)
        chosen = {}
        device = Device(**limits(kib), num_workers=2, stages=2)
        given = options_of(option, 16, width)
        emulate_mla(batch, device, buffers=chosen, kv_scale=scale, **given)
        reasons = {
            F32: dtype == "float32",
            MLA_V: v_dim > 512,
            MLA_LOGITS: option not in ("plain", "window", "sinks", "fp8 output"),
            MLA_BYTES: is_eight_bit and width % 16 != 0,
        }
        expected = "simt" if any(reasons.values()) else "latent"
        assert path_of(chosen)[0] == expected, (option, width, v_dim, is_eight_bit, kib)


def test_the_reasons_stand_in_the_documentation():
    text = SUPPORT.read_text(encoding="utf-8")
    listed = text.partition("## What runs on the SIMT kernel")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in listed.splitlines() if line.startswith("| ")]
    assert tuple(cells[1:]) == REASONS
