# SPDX-License-Identifier: Apache-2.0
"""The grids of public attention test suites, retold: sizes, lengths, data ranges and options.

Not a test: test_public_grids.py runs them. Each function below names one suite's test; its
factors are that test's parameters, and it returns a `Problem` (or None where the suite skips the
combination). Only facts are carried over; batches are built by `jax_paged.testing`, with NaN in
every slot that no row owns, and judged by our own tolerances, which are tighter than the suites'.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_paged.testing import Batch, Case, make_batch

PAGE_SPLITS = ({}, {"num_kv_splits": 1}, {"split_tokens": 512})  # automatic, the seed's v1 and v2
MAX_ELEMENTS = 1 << 26  # of a pool: beyond it rows share pages
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call: what `make_batch` needs, the pages' dtype and the op's options."""

    case: Case
    dtype: str
    rows: tuple[tuple[int, int], ...]  # (query tokens, KV tokens)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv: str | None = None  # dtype of 8-bit pages
    k_scale: float = 1.0
    v_scale: float = 1.0
    uniform: float | None = None  # data uniform within ±this; None: standard normal
    num_pages: int | None = None
    splits: tuple[dict[str, int], ...] = ({},)

    @property
    def products(self) -> int:
        """Multiplications of the two matrix products, without regard to masks."""
        case, pairs = self.case, sum(q * kv for q, kv in self.rows)
        return pairs * case.num_q_heads * 2 * case.head_dim

    @property
    def pool_pages(self) -> int:
        """As many as the suite has, or as the rows own and three."""
        case = self.case
        if self.num_pages is not None:
            return self.num_pages
        pages_of = [-(-kv // case.page_size) for _, kv in self.rows]
        limit = MAX_ELEMENTS // (case.page_size * case.num_kv_heads * case.head_dim)
        return min(sum(pages_of), max(limit, *pages_of)) + 3

    @property
    def pool_bytes(self) -> int:
        """Of K or V."""
        case, width = self.case, 1 if self.kv else jnp.dtype(self.dtype).itemsize
        return self.pool_pages * case.page_size * case.num_kv_heads * case.head_dim * width


GRIDS: dict[str, tuple[dict[str, tuple], Callable[..., Problem | None]]] = {}


def grid(**factors: tuple):
    """Registers a suite's test with its parameters."""

    def register(make: Callable[..., Problem | None]):
        GRIDS[make.__name__] = (factors, make)
        return make

    return register


def problems(name: str) -> list[tuple[str, Problem]]:
    """All problems of a grid, each with its parameters as text."""
    factors, make = GRIDS[name]
    found = []
    for index, values in enumerate(itertools.product(*factors.values())):
        row = dict(zip(factors, values, strict=True))
        problem = make(np.random.default_rng(index), **row)
        if problem is not None:
            found.append((",".join(f"{k}={v}" for k, v in row.items()), problem))
    return found


class Built(NamedTuple):
    """The data of a problem."""

    arguments: tuple[Any, ...]  # of `ragged_paged_attention`, and its options
    options: dict[str, Any]
    real: Batch  # what they mean for the oracle
    scales: dict[str, Any]


def build(problem: Problem) -> Built:
    """The data of a problem. Those that differ in options alone share it, one behind the other."""
    key = repr(dataclasses.replace(problem, options={}, splits=()))
    if key not in _last:
        _last.clear()
        stored, real, scales = _data(problem, seed=zlib.crc32(key.encode()))
        _last[key] = Built(*stored.ragged(), real, scales)
    return _last[key]


_last: dict[str, Built] = {}


def _data(problem: Problem, seed: int) -> tuple[Batch, Batch, dict[str, Any]]:
    """(the batch as the op gets it, what it means for the oracle, the scales)."""
    q_lens, kv_lens = zip(*problem.rows, strict=True)
    batch = make_batch(
        problem.case, jnp.dtype(problem.dtype), q_lens, kv_lens, num_pages=problem.pool_pages,
        uniform=problem.uniform, seed=seed,
    )  # fmt: skip
    if problem.kv is None:
        return batch, batch, {}
    limit, dtype = LARGEST[problem.kv], jnp.dtype(problem.kv)
    scales = {"k": np.float32(problem.k_scale), "v": np.float32(problem.v_scale)}
    table = batch.page_table
    owned = np.unique(table[(table >= 0) & (table < len(batch.k_pages))])
    stored, real = {}, {}
    for pool, scale in scales.items():
        pages = getattr(batch, f"{pool}_pages")
        codes = np.full(pages.shape, np.nan, dtype)
        codes[owned] = np.clip(pages[owned].astype(np.float32) / scale, -limit, limit).astype(dtype)
        values = np.full(pages.shape, np.nan, np.float32)
        values[owned] = codes[owned].astype(np.float32) * scale
        stored[f"{pool}_pages"], real[f"{pool}_pages"] = codes, values
    return (
        dataclasses.replace(batch, **stored),
        dataclasses.replace(batch, **real),
        {f"{pool}_scale": jnp.float32(scale) for pool, scale in scales.items()},
    )


def usual_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's published slopes: powers of 2^(−8/n), for other n filled up from the next power."""
    whole = 2 ** int(np.log2(num_heads))
    first = 2.0 ** (-8.0 / whole * np.arange(1, whole + 1))
    between = 2.0 ** (-8.0 / (2 * whole) * np.arange(1, 2 * whole + 1, 2))
    return np.float32(np.concatenate([first, between[: num_heads - whole]]))


def _case(heads: tuple[int, int], head_dim: int, page_size: int, *, causal=True, layout="NHD"):
    return Case("public", *heads, head_dim, page_size, layout=layout, causal=causal)


def _prefix_prefill_rows(rng: np.random.Generator, *, with_decode: bool):
    new = rng.integers(16, 1025, 10)
    if with_decode:
        new[-1] = 1
    old = rng.integers(16, 1025, 10)
    return tuple((int(q), int(q + kv)) for q, kv in zip(new, old, strict=True))


@grid(
    queries_per_kv=(1, 64), head_dim=(24, 128), kv=(None, "float8_e4m3fn", "float8_e5m2"),
    window=(0, 16, 2048),
)  # fmt: skip
def vllm_prefix_prefill(rng, queries_per_kv, head_dim, kv, window):
    """vLLM, test_prefix_prefill: chunked_prefill_paged_decode, data within ±0.001."""
    return Problem(
        _case((64, 64 // queries_per_kv), head_dim, 32, layout="vllm5d" if kv is None else "HND"),
        "float16", _prefix_prefill_rows(rng, with_decode=True), {"sliding_window": window}, kv,
        uniform=1e-3, num_pages=640,
    )  # fmt: skip


@grid(queries_per_kv=(1, 64), head_dim=(24, 128), kv=(None, "float8_e4m3fn", "float8_e5m2"))
def vllm_prefix_prefill_alibi(rng, queries_per_kv, head_dim, kv):
    """The same with ALiBi and without a decode row."""
    return Problem(
        _case((64, 64 // queries_per_kv), head_dim, 32, layout="vllm5d" if kv is None else "HND"),
        "float16", _prefix_prefill_rows(rng, with_decode=False),
        {"alibi_slopes": usual_slopes(64)}, kv, uniform=1e-3, num_pages=640,
    )  # fmt: skip


@grid(
    rows=(((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011))),
    heads=((4, 4), (8, 2), (5, 1)), head_dim=(128, 256), window=(None, 64, 128, 256),
    soft_cap=(None, 50.0), num_pages=(32768, 2048),
)  # fmt: skip
def vllm_unified_attention(rng, rows, heads, head_dim, window, soft_cap, num_pages):
    """vLLM, test_triton_unified_attention: its 2-D and 3-D kernels are our ways to split."""
    options = {"sliding_window": window, "soft_cap": soft_cap}
    return Problem(
        _case(heads, head_dim, 16), "bfloat16", rows, options, num_pages=num_pages,
        splits=({}, {"num_kv_splits": 16}),
    )  # fmt: skip


@grid(
    heads=((32, 8), (40, 40), (64, 8)), head_dim=(64, 128), alibi=(False, True),
    page_size=(16, 32), dtype=("bfloat16", "float16"), kv=(None, "float8_e4m3fn"),
)  # fmt: skip
def vllm_attention(rng, heads, head_dim, alibi, page_size, dtype, kv):
    """vLLM, test_attention: v1 and v2, seven rows of up to the length that v1's shared memory held.

    That length depends on the GPU: here a sixteenth of an A100's, 2576 tokens.
    """
    kv_lens = [*(int(n) for n in rng.integers(1, 2577, 6)), 2576]
    slopes = {"alibi_slopes": np.float32(rng.standard_normal(heads[0]))} if alibi else {}
    return Problem(
        _case(heads, head_dim, page_size, layout="vllm5d" if kv is None else "HND"), dtype,
        tuple((1, n) for n in kv_lens), slopes, kv, *((0.5, 0.25) if kv else ()),
        uniform=head_dim**-0.5, splits=PAGE_SPLITS,
    )  # fmt: skip


CPU_ROWS = (
    ((1, 213), (1, 1), (1, 312), (1, 7), (1, 7812)),
    ((2345, 2345), (5, 5), (3, 16), (134, 5131)),
    ((992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)),
)
CPU_HEADS = ((4, 4), (8, 2), (9, 3))


@grid(
    kv=(None, "float8_e4m3fn", "float8_e5m2"), rows=CPU_ROWS, heads=CPU_HEADS,
    head_dim=(96, 128, 512), page_size=(96, 128), window=(None, 256),
    dtype=("bfloat16", "float16", "float32"),
)  # fmt: skip
def vllm_cpu_attention(rng, kv, rows, heads, head_dim, page_size, window, dtype):
    """vLLM, test_cpu_attn."""
    return Problem(
        _case(heads, head_dim, page_size, layout="HND"), dtype, rows, {"sliding_window": window},
        kv, num_pages=1024, splits=({"num_kv_splits": 1}, {}),
    )  # fmt: skip


@grid(rows=CPU_ROWS, heads=CPU_HEADS, head_dim=(80, 96, 112, 128), window=(None, 256))
def vllm_cpu_attention_pages_of_48(rng, rows, heads, head_dim, window):
    """vLLM, test_cpu_attn: the sizes of its narrow kernels."""
    return Problem(
        _case(heads, head_dim, 48, layout="HND"), "bfloat16", rows, {"sliding_window": window},
        num_pages=1024,
    )  # fmt: skip


@grid(
    kv=(None, "float8_e4m3fn"), rows=CPU_ROWS, heads=CPU_HEADS, window=(None, 256),
    option=("soft_cap", "alibi", "sinks"),
)  # fmt: skip
def vllm_cpu_attention_options(rng, kv, rows, heads, window, option):
    """vLLM, test_cpu_attn: soft caps of 50, ALiBi, sinks within [0, 15)."""
    options = {
        "soft_cap": lambda: {"soft_cap": 50.0},
        "alibi": lambda: {"alibi_slopes": usual_slopes(heads[0])},
        "sinks": lambda: {"sinks": np.float32(15 * rng.random(heads[0]))},
    }[option]()
    return Problem(
        _case(heads, 96, 128, layout="HND"), "bfloat16", rows,
        {"sliding_window": window} | options, kv, num_pages=1024,
    )  # fmt: skip


@grid(heads=CPU_HEADS, head_dim=(96, 128, 512), dtype=("bfloat16", "float16", "float32"))
def vllm_cpu_encoder(rng, heads, head_dim, dtype):
    """vLLM, test_cpu_attn: encoders, where every token sees every other of its row."""
    rows = tuple((n, n) for n in (1, 678, 2367, 145, 4162, 36, 7812))
    return Problem(_case(heads, head_dim, 128, causal=False, layout="HND"), dtype, rows)


@grid(
    batch=(12, 17, 128), kv_len=(54, 97, 512, 2048, 16384), page_size=(1, 8, 16),
    num_q_heads=(4, 32), head_dim=(128, 256, 512), kv=(None, "float8_e4m3fn"),
)  # fmt: skip
def flashinfer_batch_decode(rng, batch, kv_len, page_size, num_q_heads, head_dim, kv):
    """FlashInfer, test_batch_decode_kernels (without RoPE inside the kernel)."""
    case = _case((num_q_heads, 4), head_dim, page_size)
    return Problem(case, "float16", ((1, kv_len),) * batch, kv=kv)


@grid(
    batch=(12, 17, 128), kv_len=(54, 97, 512, 2048), q_len=(37, 17, 127, 577),
    page_size=(1, 5, 16), heads=((32, 32), (4, 4), (32, 4)), head_dim=(128, 256),
    causal=(False, True),
)  # fmt: skip
def flashinfer_batch_prefill(rng, batch, kv_len, q_len, page_size, heads, head_dim, causal):
    """FlashInfer, test_batch_prefill_kernels."""
    if causal and q_len > kv_len:
        return None
    case = _case(heads, head_dim, page_size, causal=causal)
    return Problem(case, "float16", ((q_len, kv_len),) * batch)


@grid(
    dtype=("float16", "bfloat16"), batch=(1, 4, 16), seq_len=(1, 4, 16, 128),
    num_kv_heads=(8, 32), window_left=(-1, 128), causal=(True, False),
)  # fmt: skip
def flashinfer_sinks(rng, dtype, batch, seq_len, num_kv_heads, window_left, causal):
    """FlashInfer, test_attention_sink: whole prompts in pages of one token."""
    return _sinks(rng, dtype, ((seq_len, seq_len),) * batch, num_kv_heads, window_left, causal)


@grid(
    dtype=("float16", "bfloat16"), batch=(1, 4, 16), kv_len=(32, 33, 34, 35, 128, 129, 130, 131),
    num_kv_heads=(8, 32), window_left=(-1, 128), causal=(True, False),
)  # fmt: skip
def flashinfer_sinks_decode(rng, dtype, batch, kv_len, num_kv_heads, window_left, causal):
    """The same: generation of up to four tokens after 32 or 128."""
    return _sinks(rng, dtype, ((1, kv_len),) * batch, num_kv_heads, window_left, causal)


@grid(
    dtype=("float16", "bfloat16"), batch=(1, 4, 16), chunk=(128, 256), history=(256, 512),
    num_kv_heads=(8, 32), window_left=(-1, 128), causal=(True, False),
)  # fmt: skip
def flashinfer_sinks_chunks(rng, dtype, batch, chunk, history, num_kv_heads, window_left, causal):
    """The same: a chunk after its history."""
    if chunk >= history:
        return None
    rows = ((chunk, history + chunk),) * batch
    return _sinks(rng, dtype, rows, num_kv_heads, window_left, causal)


def _sinks(rng, dtype, rows, num_kv_heads, window_left, causal):
    if not causal and window_left >= 0:  # there the window has a right edge too; ours has none
        return None
    options = {"sliding_window": window_left + 1, "sinks": np.float32(5 * rng.random(32))}
    return Problem(_case((32, num_kv_heads), 128, 1, causal=causal), dtype, rows, options)


@grid(seq_len=(1, 9, 81, 729, 33001), heads=(4, 8, 32), head_dim=(128, 256), soft_cap=(1, 30, 50))
def flashinfer_soft_cap_decode(rng, seq_len, heads, head_dim, soft_cap):
    """FlashInfer, test_logits_cap: one row of decode."""
    case = _case((heads, heads), head_dim, 16)
    return Problem(case, "float16", ((1, seq_len),), {"soft_cap": float(soft_cap)})


@grid(
    q_len=(1, 17, 81, 987), kv_len=(1, 17, 81, 987, 31111), heads=(4, 8, 32), head_dim=(128, 256),
    soft_cap=(1, 30, 50),
)  # fmt: skip
def flashinfer_soft_cap_prefill(rng, q_len, kv_len, heads, head_dim, soft_cap):
    """The same: one row of prefill that sees all keys."""
    case = _case((heads, heads), head_dim, 16, causal=False)
    return Problem(case, "float16", ((q_len, kv_len),), {"soft_cap": float(soft_cap)})


@grid(seq_len=(1, 9, 81, 729), heads=(4, 8, 32), head_dim=(128, 256))
def flashinfer_alibi_decode(rng, seq_len, heads, head_dim):
    """FlashInfer, test_alibi: one row of decode."""
    options = {"alibi_slopes": usual_slopes(heads)}
    return Problem(_case((heads, heads), head_dim, 16), "float16", ((1, seq_len),), options)


@grid(
    q_len=(1, 17, 81, 987), kv_len=(1, 17, 81, 987), heads=(4, 8, 32), head_dim=(128, 256),
    causal=(False, True),
)  # fmt: skip
def flashinfer_alibi_prefill(rng, q_len, kv_len, heads, head_dim, causal):
    """The same: one row of prefill."""
    if causal and q_len > kv_len:
        return None
    case = _case((heads, heads), head_dim, 16, causal=causal)
    return Problem(case, "float16", ((q_len, kv_len),), {"alibi_slopes": usual_slopes(heads)})


@grid(
    batch=(1, 3, 13, 32), kv_len=(1, 3, 19, 99, 199, 1177, 1999),
    window_left=(3, 13, 23, 33, 37, 43, 533), num_kv_heads=(1, 4), num_q_heads=(4, 8),
    head_dim=(64, 128, 256, 512), page_size=(1, 16),
)  # fmt: skip
def flashinfer_window_decode(
    rng, batch, kv_len, window_left, num_kv_heads, num_q_heads, head_dim, page_size
):
    """FlashInfer, test_sliding_window: its single and batched decode in one grid."""
    return Problem(
        _case((num_q_heads, num_kv_heads), head_dim, page_size), "float16", ((1, kv_len),) * batch,
        {"sliding_window": window_left + 1},
    )  # fmt: skip


@grid(
    batch=(1, 12, 17, 30), kv_len=(54, 99, 199, 397, 1177, 1999), q_len=(1, 37, 47, None),
    window_left=(13, 33, 43, 111, 233), num_kv_heads=(1, 4, 8), num_q_heads=(4, 8),
    head_dim=(64, 128, 256, 512), page_size=(1, 16),
)  # fmt: skip
def flashinfer_window_prefill(
    rng, batch, kv_len, q_len, window_left, num_kv_heads, num_q_heads, head_dim, page_size
):
    """The same for prefill: one whole prompt (q_len None), or a batch of chunks."""
    if num_q_heads < num_kv_heads or (q_len is None) != (batch == 1):
        return None
    return Problem(
        _case((num_q_heads, num_kv_heads), head_dim, page_size), "float16",
        ((q_len or kv_len, kv_len),) * batch, {"sliding_window": window_left + 1},
    )  # fmt: skip
