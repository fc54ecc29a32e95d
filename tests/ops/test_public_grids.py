# SPDX-License-Identifier: Apache-2.0
"""Public suites' grids through our ops: vLLM's, FlashInfer's and JAX's (see public_grids.py).

A seeded sample of each grid's lighter problems runs, some of it in the deep tier alone;
JAX_PAGED_LONG=1 runs all, which takes hours: `-k` with a grid's name picks one.
"""

import dataclasses
import functools
import itertools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_grids import GRIDS, build, problems
from tiers import first_of

from jax_paged import (
    cascade_attention,
    merge_attention_states,
    paged_attention,
    ragged_paged_attention,
)
from jax_paged.layout import slots_first
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch

LONG = os.environ.get("JAX_PAGED_LONG") == "1"
SAMPLE = 5  # problems of a grid that run
DEFAULT_SAMPLE = 1  # of which so many in the default tier
LIGHT = 3e9  # multiplications that they may take
LIGHT_BYTES = 1 << 27  # and bytes of K
WHOLE = 2e9  # up to here the oracle computes all queries, beyond it some of some rows
PROBED_ROWS = 16


@functools.cache
def chosen(name: str):
    """(index, id, problem) of the problems to run."""
    found = [(i, text, problem) for i, (text, problem) in enumerate(problems(name))]
    if LONG:  # problems of one shape side by side: they share a program
        return sorted(found, key=lambda x: (str(x[2].case), x[2].dtype, str(x[2].kv), x[2].rows))
    light = [x for x in found if x[2].products <= LIGHT and x[2].pool_bytes <= LIGHT_BYTES]
    picks = np.random.default_rng(len(found)).permutation(len(light))[:SAMPLE]
    return [light[i] for i in sorted(picks)]


PARAMETERS = [
    pytest.param(
        index,
        problem,
        id=f"{name}-{text}".replace("/", "_"),
        marks=[pytest.mark.deep] if number >= DEFAULT_SAMPLE else [],
    )
    for name in GRIDS
    for number, (index, text, problem) in enumerate(chosen(name))
]


def probes(problem, seed: int) -> np.ndarray:
    """The tokens that are compared: all, or the first, last and some other queries of some rows."""
    total = sum(q for q, _ in problem.rows)
    if problem.products <= WHOLE:
        return np.arange(total)
    rng, start, picked = np.random.default_rng(seed), 0, []
    rows = {0, len(problem.rows) - 1, *rng.permutation(len(problem.rows))[:PROBED_ROWS]}
    for row, (q_len, _) in enumerate(problem.rows):
        edge = np.r_[:8, q_len - 8 : q_len]
        if row in rows:
            picked.append(start + np.r_[edge, rng.integers(0, q_len, 16)].clip(0, q_len - 1))
        start += q_len
    return np.unique(np.concatenate(picked))


@pytest.mark.parametrize(("index", "problem"), PARAMETERS)
def test_grid(index, problem):
    if index % 300 == 0:
        jax.clear_caches()  # a process can map only so many programs
    arguments, defaults, real, scales = build(problem)
    queries = probes(problem, index)
    expected = dense_oracle(real, queries=queries, **problem.options)
    for split in problem.splits:
        options = defaults | problem.options | scales | split | {"return_lse": True}
        if all(q == 1 for q, _ in problem.rows) and options.pop("causal"):
            out, lse = paged_attention(*arguments[:5], **options)
        else:
            options["causal"] = problem.case.causal
            out, lse = ragged_paged_attention(*arguments, **options)
        assert jnp.isfinite(out).all()
        assert_attention_close(out[queries], lse[queries], *(x[queries] for x in expected))


MERGES = list(
    itertools.product(
        (256, 512, 613, 1024, 1536, 4096), (4, 8, 16, 32, 48, 64), (32, 48, 64, 96, 128, 256),
        ("float32", "float16", "bfloat16"), (None, 128),
    )
)  # fmt: skip
if not LONG:
    MERGES = [MERGES[i] for i in np.random.default_rng(5).permutation(len(MERGES))[:10]]
    MERGES.sort(key=lambda merge: np.prod(merge[:3]))


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dtype", "with_context"), first_of(MERGES, 2)
)
def test_vllm_merge_states(tokens, heads, head_dim, dtype, with_context):
    """vLLM, test_merge_attn_states: tenths of each part are empty (there +inf, here −inf), and

    tokens from `with_context` on have no prefix.
    """
    rng = np.random.default_rng([tokens, heads, head_dim])
    out = rng.standard_normal((2, tokens, heads, head_dim), "f4").astype(jnp.dtype(dtype))
    lse = rng.standard_normal((2, tokens, heads), "f4")
    empty = rng.random(lse.shape) < 0.1
    empty &= ~empty.all(0)
    if with_context:
        empty[0, with_context:], empty[1, with_context:] = True, False
    lse[empty] = -np.inf
    merged, merged_lse = merge_attention_states(out[0], lse[0], out[1], lse[1])
    wide = np.logaddexp(*lse.astype(np.float64))
    weights = np.exp(lse - wide)
    expected = (weights[..., None] * out.astype(np.float64)).sum(0)
    assert_attention_close(merged, merged_lse, expected, wide)
    np.testing.assert_array_equal(merged[empty[0]], out[1][empty[0]])


def reference_of_jax(module: str, name: str):
    """A reference function of JAX's own, run under JAX's default promotion rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that the module will go
        function = getattr(
            __import__(f"jax.experimental.pallas.ops.{module}", fromlist=[name]), name
        )

    def run(*arguments, **options):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return np.asarray(function(*arguments, **options), np.float64)

    return run


GPU_GRID = [
    pytest.param(*row, id="-".join(map(str, row)))
    for row in itertools.product(
        (8, 16, 32), (1, 2), (2, 16, 20), (32, 64), (None, 4, 16),
        (None, "float8_e5m2", "float8_e4m3fn", "int8"),
    )
]  # fmt: skip
if not LONG:
    GPU_GRID = [GPU_GRID[i] for i in np.random.default_rng(6).permutation(len(GPU_GRID))[:10]]


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "ratio", "head_dim", "splits", "kv"), first_of(GPU_GRID, 2)
)
def test_jax_gpu_paged_attention(page_size, kv_heads, ratio, head_dim, splits, kv):
    """JAX, gpu_paged_attention_test: unit vectors, no scale on the logits, a scale per token."""
    reference = reference_of_jax("gpu.paged_attention", "paged_attention_reference")
    lengths = np.int32([3, 256, 513, 1023, 2048])
    case = Case("jax", kv_heads * ratio, kv_heads, head_dim, page_size)
    batch = make_batch(case, jnp.dtype("float16"), [1] * 5, lengths)
    batch = dataclasses.replace(batch, sm_scale=1.0)

    def unit(x):
        x = x.astype(np.float32)
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float16)

    batch = dataclasses.replace(
        batch, q=unit(batch.q), k_pages=unit(batch.k_pages), v_pages=unit(batch.v_pages)
    )
    real, scales = batch, {}
    if kv:
        real, stored = {}, {}
        largest = 127.0 if kv == "int8" else float(jnp.finfo(kv).max)
        for pool in ("k", "v"):
            x = getattr(batch, f"{pool}_pages").astype(np.float32)
            scale = np.abs(x).max(-1) / np.float32(0.95 * largest)
            codes = x / scale[..., None]
            codes = np.nan_to_num(np.rint(codes), nan=-97) if kv == "int8" else codes
            stored[f"{pool}_pages"] = codes = codes.astype(jnp.dtype(kv))
            real[f"{pool}_pages"] = codes.astype(np.float32) * scale[..., None]
            scales[f"{pool}_scale"] = jnp.asarray(scale)
        real = dataclasses.replace(batch, **real)
        batch = dataclasses.replace(batch, **stored)
    arguments, options = batch.ragged()
    options.pop("causal")
    out, lse = paged_attention(
        *arguments[:5], **options, **scales, num_kv_splits=splits, return_lse=True
    )
    assert_attention_close(out, lse, *dense_oracle(real))
    dense = []
    for pages in (real.k_pages, real.v_pages):  # [rows, tokens, heads, dim], zero where none is
        rows = slots_first(pages, "HND")[np.clip(batch.page_table, 0, len(pages) - 1)]
        rows = rows.reshape(5, -1, kv_heads, head_dim).astype(np.float32)
        stored = np.arange(rows.shape[1])[None, :] < lengths[:, None]
        dense.append(np.where(stored[..., None, None], rows, 0))
    expected = reference(batch.q.astype(np.float32), *dense, lengths=lengths)
    assert_attention_close(out, lse, expected, np.asarray(lse))


BASIC = ((192, 328), (128, 180), (64, 255))
DECODE = tuple(
    (1, n)
    for n in (18, 129, 597, 122, 64, 322, 463, 181, 1107, 123, 31, 18, 1229, 229, 87, 1328)
)  # fmt: skip


def with_queries(*q_lens):
    return tuple((q, kv) for q, (_, kv) in zip(q_lens, DECODE, strict=True))


PREFILL = with_queries(5, 15, 120, 100, 21, 32, 251, 40, 64, 99, 10, 5, 3, 120, 9, 2)
MIXED = with_queries(5, 1, 120, 1, 1, 32, 251, 1, 1, 99, 1, 5, 3, 117, 1, 1)


def drawn(num_seqs: int):
    rng = np.random.default_rng(1234)
    new, more = rng.integers(1, 100, num_seqs), rng.integers(0, 50, num_seqs)
    return tuple((int(q), int(q + n)) for q, n in zip(new, more, strict=True))


TPU_GRID = [
    *((rows, (32, 8), dtype, None, {}) for rows in (BASIC, DECODE, PREFILL, MIXED)
      for dtype in ("float32", "bfloat16")),
    *((drawn(n), heads, dtype, None, {}) for n in (1, 5, 16)
      for heads in ((32, 8), (32, 16), (16, 2), (4, 4), (8, 1))
      for dtype in ("float32", "bfloat16")),
    *((drawn(5), (4, 4), "float32", None, {"sliding_window": w}) for w in (None, 5, 128)),
    *((drawn(2), (16, 2), "float32", None, {"soft_cap": c}) for c in (None, 50.0)),
    *((BASIC, (32, 8), "bfloat16", kv, {"k_scale": s, "v_scale": s})
      for kv in ("float8_e5m2", "float8_e4m3fn") for s in (0.5, None)),
]  # fmt: skip
if not LONG:
    TPU_GRID = [TPU_GRID[i] for i in (9, 43, 0, 7, 14, 21, 26, 39, 40, 42, 46)]


@pytest.mark.parametrize(("rows", "heads", "dtype", "kv", "options"), first_of(TPU_GRID, 2))
def test_jax_tpu_ragged_paged_attention(rows, heads, dtype, kv, options):
    """JAX, tpu_ragged_paged_attention_test: head_dim 128, no scale on the logits, dead rows."""
    reference = reference_of_jax("tpu.ragged_paged_attention", "ref_ragged_paged_attention")
    q_lens, kv_lens = zip(*rows, strict=True)
    dead = max(8 - len(rows), 0)
    case = Case("jax", *heads, 128, layout="NHD")
    batch = make_batch(
        case, jnp.dtype(dtype), [*q_lens, *[0] * dead], [*kv_lens, *[0] * dead],
        num_tokens=max(sum(q_lens), 512), num_seqs=len(rows), num_pages=1000,
    )  # fmt: skip
    batch = dataclasses.replace(batch, sm_scale=1.0)
    size = 128**0.5  # of the logits: q and k are standard normal
    real = batch
    if kv:
        pages = {f"{p}_pages": getattr(batch, f"{p}_pages").astype(jnp.dtype(kv)) for p in "kv"}
        batch = dataclasses.replace(batch, **pages)
        scale = np.float32(options["k_scale"] or 1)
        real = dataclasses.replace(
            batch, **{name: x.astype(np.float32) * scale for name, x in pages.items()}
        )
    arguments, defaults = batch.ragged()
    out, lse = ragged_paged_attention(*arguments, **(defaults | options), return_lse=True)
    masks = {name: x for name, x in options.items() if not name.endswith("scale")}
    assert_attention_close(out, lse, *dense_oracle(real, **masks), logit_size=size)
    pool = np.empty((1000, 16, 2 * heads[1], 128), np.float32)  # K and V of a head side by side
    pool[:, :, 0::2], pool[:, :, 1::2] = real.k_pages, real.v_pages
    total = sum(q_lens)
    expected = reference(
        jnp.asarray(batch.q.astype(np.float32)), jnp.asarray(pool), jnp.asarray(batch.seq_lens),
        jnp.asarray(batch.page_table), jnp.asarray(batch.cu_q_lens),
        jnp.asarray([len(rows)], jnp.int32), **masks,
    )  # fmt: skip
    assert_attention_close(
        out[:total], lse[:total], expected, np.asarray(lse[:total]), logit_size=size
    )


SHARED = list(
    itertools.product(
        ("decode", "append"), (12, 17), (37, 17), (128, 512, 2048), (8, 16), (128, 256), (1, 16)
    )
)
if not LONG:
    SHARED = [SHARED[i] for i in (1, 22, 47, 90, 101)]


@pytest.mark.parametrize(
    ("stage", "rows", "unique", "shared", "heads", "head_dim", "page_size"), first_of(SHARED, 1)
)
def test_flashinfer_shared_prefix(stage, rows, unique, shared, heads, head_dim, page_size):
    """FlashInfer, test_shared_prefix_kernels: a cascade of two levels, every key seen."""
    case = Case("shared", heads, heads, head_dim, page_size, layout="NHD", causal=False)
    new = 1 if stage == "decode" else unique
    batch = make_batch(case, jnp.float16, [new] * rows, [shared + unique] * rows)
    prefix_pages = shared // page_size
    table = batch.page_table.copy()
    table[:, :prefix_pages] = table[0, :prefix_pages]
    batch = dataclasses.replace(batch, page_table=table)
    q, k_pages, v_pages, *_ = batch.operands()
    levels = [
        (table[:1, :prefix_pages], np.int32([shared]), np.zeros(rows, np.int32)),
        (table[:, prefix_pages:], np.full(rows, unique, np.int32)),
    ]
    out, lse = cascade_attention(
        q, k_pages, v_pages, levels, jnp.asarray(batch.cu_q_lens), layout="NHD", causal=False,
        return_lse=True,
    )  # fmt: skip
    queries = np.unique(np.linspace(0, len(out) - 1, 60, dtype=int))
    expected = dense_oracle(batch, queries=queries)
    # Two parts, each rounded to f16 before they are merged.
    assert_attention_close(out[queries], lse[queries], *(x[queries] for x in expected))
