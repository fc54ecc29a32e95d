# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: every kernel once on tiny shapes, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/gpu_tiny.py --rows FILE [--dry]

The results are compared too, with float64 or with the reference. Inputs come from the host as they
are, so that initcheck knows what was written.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Report

from jax_paged import (
    merge_attention_states,
    mla_paged_attention,
    moe_experts,
    qkv_norm_rope_write,
    quantize_weight,
    ragged_paged_attention,
    tree_intervals,
    write_kv,
)
from jax_paged.ops import reference
from jax_paged.ops.rope import Rope, inverse_frequencies, rope_tables
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch

OPTIONS: dict[str, Any] = {
    "sliding_window": 40, "soft_cap": 3.0,
    "alibi_slopes": np.float32(2.0 ** -np.arange(1, 9)), "sinks": np.linspace(-1, 2, 8, dtype="f4"),
}  # fmt: skip

# (case, dtype, q_lens, seq_lens, options): the tensor-core kernel with whole pages and with pages
# that a warp's tokens cross, queries in shared memory, wide groups, splits, vllm5d pages; prefill
# rows of both; the kernel for f32 and for vllm5d pages of odd sizes; the options in each kernel.
CASES: tuple[tuple[Case, Any, Any, Any, Any], ...] = (
    (Case("d64", 8, 2, 64), "bfloat16", [1, 0, 3, 1], [70, 5, 33, 0], {}),
    (Case("d128_page5", 4, 1, 128, page_size=5), "float16", [1, 2], [131, 64], {}),
    (Case("d192", 4, 2, 192), "bfloat16", [1], [40], {}),
    (Case("vllm5d", 4, 2, 64, layout="vllm5d"), "bfloat16", [1, 2], [70, 21], {}),
    (Case("vllm5d_page5", 4, 2, 64, page_size=5, layout="vllm5d"), "float16", [1, 2], [70, 21], {}),
    (Case("prefill", 8, 2, 128), "bfloat16", [40, 1, 7], [90, 33, 7], {}),
    (Case("prefill_vllm5d", 8, 2, 128, layout="vllm5d"), "float16", [40, 1, 7], [90, 33, 7], {}),
    (Case("wide", 20, 1, 64), "bfloat16", [1, 9], [100, 9], {"split_tokens": 64}),
    (Case("f32", 4, 2, 40, v_head_dim=24), "float32", [1, 5], [90, 20], {"num_kv_splits": 3}),
    (Case("options", 8, 2, 128), "bfloat16", [30, 1, 2, 0], [130, 90, 70, 5], OPTIONS),
    (Case("options_vllm5d", 8, 2, 64, layout="vllm5d"), "float16", [1, 3], [90, 70], OPTIONS),
    (Case("options_f32", 8, 2, 40), "float32", [1, 5], [90, 70], OPTIONS | {"split_tokens": 64}),
)


# (case, dtype, kind of pages): rows of all kernels, with the head dims that have one.
EIGHT_BIT = (
    (Case("e4m3_d64", 8, 2, 64), "bfloat16", "float8_e4m3fn"),
    (Case("e5m2_d128", 8, 2, 128, layout="NHD"), "float16", "float8_e5m2"),
    (Case("int8_d128", 8, 2, 128), "bfloat16", "int8"),
    (Case("int8_d192", 8, 2, 192), "bfloat16", "int8"),
    (Case("e4m3_d256", 8, 2, 256), "float16", "float8_e4m3fn"),
    (Case("int8_f32", 8, 2, 40), "float32", "int8"),
)
TREES = (
    Case("tree_d128", 8, 2, 128), Case("tree_vllm5d", 8, 2, 64, layout="vllm5d"),
    Case("tree_d256", 4, 2, 256),
)  # fmt: skip


def attend(case: Case, dtype: str, q_lens, seq_lens, options) -> None:
    """One ragged call against the oracle."""
    case = dataclasses.replace(case, num_layers=2)
    batch = make_batch(case, dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 2)
    arguments, defaults = batch.ragged()
    out, lse = ragged_paged_attention(
        *arguments, **defaults, **options, return_lse=True, implementation="native"
    )
    given = {name: x for name, x in options.items() if name in OPTIONS}
    assert_attention_close(out, lse, *dense_oracle(batch, **given))


def attend_codes(case: Case, dtype: str, kind: str) -> None:
    """One ragged call on 8-bit pages against the oracle of what their codes stand for."""
    batch = make_batch(case, dtype, [1, 3, 30, 0], [90, 70, 33, 5], num_tokens=36)
    codes = {
        name: np.where(np.isnan(pages), 0, np.clip(np.rint(pages * 30), -100, 100)).astype(kind)
        for name, pages in (
            (name, np.asarray(getattr(batch, name), "f4")) for name in ("k_pages", "v_pages")
        )
    }
    stored = dataclasses.replace(batch, **codes)
    size = 1 / 30
    wide = np.float64(np.float32(size))
    real = {name: pages.astype("f8") * wide for name, pages in codes.items()}
    arguments, defaults = stored.ragged()
    out, lse = ragged_paged_attention(
        *arguments, **defaults, k_scale=size, v_scale=size, return_lse=True,
        implementation="native",
    )  # fmt: skip
    assert_attention_close(out, lse, *dense_oracle(dataclasses.replace(batch, **real)))


def attend_special(case: Case, dtype: str, name: str) -> None:
    """Trees, rows with pinned tokens, or rope inside, against the oracle."""
    batch = make_batch(case, dtype, [7, 1, 30], [90, 70, 60], num_tokens=40)
    options: dict[str, Any] = {}
    if name == "tree":
        parents = np.full((3, 8), -1, np.int32)
        parents[0, :7] = (np.arange(7) - 1) // 2
        sizes = np.array([7, 0, 0], np.int32)
        tree, _, _ = tree_intervals(jnp.asarray(parents), jnp.asarray(sizes))
        options = {"tree": np.asarray(tree), "tree_sizes": sizes}
    elif name == "pins":
        options = {
            "sliding_window": np.array([40, 20, 33], np.int32),
            "num_pinned": np.array([9, 16, 1], np.int32),
        }
    elif name == "rope":
        tables = rope_tables(jnp.arange(100), inverse_frequencies(case.head_dim, 1e4))
        options = {"rope": Rope(*tables, "half")}
    arguments, defaults = batch.ragged()
    out, lse = ragged_paged_attention(
        *arguments, **defaults, **options, return_lse=True, implementation="native"
    )
    assert_attention_close(out, lse, *dense_oracle(batch, **options))


def attend_latent(heads: int, dtype: str) -> None:
    """MLA of 576 / 512 against the oracle."""
    case = Case("mla", heads, 1, 576)
    batch = make_batch(case, dtype, [1, 5], [70, 20], num_tokens=8)
    batch = dataclasses.replace(batch, v_pages=batch.k_pages[..., :512], sm_scale=0.04)
    q, pages, _, *rows = batch.ragged()[0]
    out, lse = mla_paged_attention(
        q, jnp.squeeze(pages, -3), *rows, sm_scale=0.04, v_head_dim=512, return_lse=True,
        implementation="native",
    )  # fmt: skip
    assert_attention_close(out, lse, *dense_oracle(batch))


def write_codes(kind: str) -> None:
    """write_kv into 8-bit pages, with a scale that each token gets: the reference's bits."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((4, 2, 24), "f4")) for _ in "kv")
    slots = jnp.array([3, -1, 11, 0], jnp.int32)

    def written(implementation: Any):
        k_pages, v_pages = (jnp.zeros((3, 2, 4, 24), kind) for _ in "kv")
        scales = {name: jnp.zeros((3, 2, 4), jnp.float32) for name in ("k_scale", "v_scale")}
        return write_kv(
            k_pages, v_pages, k, v, slots, k_scale=scales["k_scale"], v_scale=scales["v_scale"],
            implementation=implementation,
        )  # fmt: skip

    for got, expected in zip(written("native"), written("reference"), strict=True):
        got, expected = (np.asarray(x).view(np.uint8) for x in (got, expected))
        np.testing.assert_array_equal(got, expected)


def write() -> None:
    """Four tokens into a pool, one of them skipped."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((4, 2, 24), "f4") for _ in "kv")
    pool = np.zeros((3, 2, 4, 24), "f4")
    slots = np.array([3, -1, 11, 0], np.int32)
    written = write_kv(*map(jnp.array, (pool, pool, k, v, slots)), implementation="native")
    for out, tokens in zip(written, (k, v), strict=True):
        expected = pool.copy()
        for slot, token in zip(slots, tokens, strict=True):
            if slot >= 0:
                expected[slot // 4, :, slot % 4] = token
        np.testing.assert_array_equal(out, expected)


def project(dtype: str, style: Any) -> None:
    """qkv_norm_rope_write of five tokens against the reference: one skipped, one beaten by a later.

    The pages start as NaN bits, and what no token writes must stay so.
    """
    rng = np.random.default_rng(0)
    heads, kv_heads, dim, tokens = 6, 2, 64, 5
    pool = np.full((2, 3, kv_heads, 4, dim), np.nan, "f4").astype(jnp.dtype(dtype))
    qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim), "f4").astype(pool.dtype)
    positions, slots = np.array([0, 5, 2, 6, 1], np.int32), np.array([3, -1, 11, 3, 0], np.int32)
    angles = rng.uniform(0, 7, (7, dim // 2))
    tables = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")
    norms = (rng.uniform(0.5, 2, dim).astype("f4") for _ in "qk")
    options: dict[str, Any] = dict(zip(("q_norm", "k_norm"), map(jnp.array, norms), strict=True))
    options |= {"num_q_heads": heads, "style": style, "layer": 1}
    operands = (qkv, pool, pool, positions, slots, *tables)
    results = qkv_norm_rope_write(*map(jnp.array, operands), **options, implementation="native")
    check = jax.jit(functools.partial(reference.qkv_norm_rope_write, **options))
    expected = check(*map(jnp.array, operands))
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7  # one rounding may fall the other way
    for got, wanted in zip(results, expected, strict=True):
        got, wanted = (np.asarray(x).astype("f4") for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def merge(dtype: str) -> None:
    """merge_attention_states against float64; one head has an empty part, one has two."""
    rng = np.random.default_rng(0)
    shape = (5, 3, 80)
    outs = [rng.standard_normal(shape, "f4").astype(jnp.dtype(dtype)) for _ in "ab"]
    lses = [rng.uniform(-9, 9, shape[:2]).astype("f4") for _ in "ab"]
    lses[0][1, 1] = lses[0][2, 0] = lses[1][2, 0] = -np.inf
    out, lse = merge_attention_states(
        *map(jnp.array, (outs[0], lses[0], outs[1], lses[1])), implementation="native"
    )
    exact = np.logaddexp(*(x.astype("f8") for x in lses))
    top = np.where(np.isneginf(exact), 0, exact)  # empty twice: both weights are exp(-inf) = 0
    weighted = (
        np.exp(x - top)[..., None] * part.astype("f8") for x, part in zip(lses, outs, strict=True)
    )
    assert_attention_close(out, lse, sum(weighted), exact)


def choose(dtype: str, quantized: bool) -> None:
    """moe_experts against float64: an id that is no expert, experts without a token, two tiles."""
    rng = np.random.default_rng(0)
    tokens, num_experts, hidden, inner = 70, 5, 80, 144
    x, gate_up, down = (
        jnp.array(rng.standard_normal(shape, "f4") / shape[-1] ** 0.5, dtype)
        for shape in (
            (tokens, hidden),
            (num_experts, 2 * inner, hidden),
            (num_experts, hidden, inner),
        )
    )
    experts = np.array([[3, 1], [3, -1]] * (tokens // 2), np.int32)
    weights = rng.random(experts.shape, "f4")
    scales: dict[str, Any] = {}
    meant = [gate_up, down]
    if quantized:
        (gate_up, of_gate_up), (down, of_down) = map(quantize_weight, meant)
        scales = {"gate_up_scale": of_gate_up, "down_scale": of_down}
        meant = [np.array(gate_up, "f8") * np.array(of_gate_up)[..., None],
                 np.array(down, "f8") * np.array(of_down)[..., None]]  # fmt: skip
    out = moe_experts(
        x, gate_up, down, jnp.array(experts), jnp.array(weights), **scales, implementation="native"
    )
    wide, *meant = (np.asarray(a, "f8") for a in (x, *meant))
    expected = np.zeros(wide.shape)
    for token, j in np.argwhere(experts >= 0):
        expert = experts[token, j]
        gate, up = np.split(meant[0][expert] @ wide[token], 2)
        expected[token] += weights[token, j] * (
            meant[1][expert] @ (gate / (1 + np.exp(-gate)) * up)
        )
    tolerance = 2e-5 if dtype == "float32" else 2.0**-8  # roundings of h and of the result
    np.testing.assert_allclose(np.asarray(out, "f8"), expected, atol=tolerance, rtol=tolerance)


def main() -> None:
    report, args = Report.from_args("Every kernel once.", **{"--label": {}})
    blocks = {case.name: functools.partial(attend, case, *rest) for case, *rest in CASES}
    blocks |= {case.name: functools.partial(attend_codes, case, *rest) for case, *rest in EIGHT_BIT}
    specials = [(case, "tree") for case in TREES]
    specials += [(Case("pins", 8, 2, 128), "pins"), (Case("rope", 8, 2, 64), "rope")]
    blocks |= {
        case.name: functools.partial(attend_special, case, "bfloat16", name)
        for case, name in specials
    }
    blocks |= {
        "mla_16": functools.partial(attend_latent, 16, "bfloat16"),
        "mla_f32": functools.partial(attend_latent, 3, "float32"),
        "write_int8": functools.partial(write_codes, "int8"),
        "write_fp8": functools.partial(write_codes, "float8_e4m3fn"),
        "write_kv": write,
        "qkv_half": functools.partial(project, "bfloat16", "half"),
        "qkv_interleaved": functools.partial(project, "float32", "interleaved"),
        "merge_bf16": functools.partial(merge, "bfloat16"),
        "merge_f32": functools.partial(merge, "float32"),
        "moe_bf16": functools.partial(choose, "bfloat16", quantized=False),
        "moe_int8": functools.partial(choose, "float16", quantized=True),
        "moe_f32": functools.partial(choose, "float32", quantized=False),
    }
    for name, block in blocks.items():
        what = {"kind": "tiny", "label": args.label, "case": name}

        def run(block=block, what=what):
            block()
            report.add(**what, ok=True)

        report.attempt(run, **what)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
