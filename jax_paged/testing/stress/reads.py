# SPDX-License-Identifier: Apache-2.0
"""The ops that read pages, or K and V, or merge what others have read."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.cascade import cascade_attention, cascade_levels
from jax_paged.ops.merge import merge_attention_states

from .. import cascade, flat, mla
from ..cases import Batch, Case
from ..options import (
    ATTENTION_FACTORS,
    LOGIT_FACTORS,
    attend,
    attention_case,
    random_parents,
    trees_of,
)
from ..oracle import TOLERANCES, assert_attention_close, dense_oracle
from .op import DTYPES, FP8, WILD, Op, Row

ATTENTION = ATTENTION_FACTORS | {
    "head_dim": ((64, None), (40, 128), (128, 72), (128, None), (192, 128), (256, None), (8, 8)),
    "page_size": (16, 1, 5, 32, 64),
    "rows": ("decode", "short", "prefill", "mixed"),
    "out_dtype": (None, None, None, None, *FP8),
}


def _attention(row: Row, seed: int, implementation: Any) -> float:
    batch, real, options, more = attention_case(row, seed, capacity=420)
    if row["out_dtype"] is not None:
        more |= {"out_dtype": row["out_dtype"], "out_scale": jnp.float32(0.02 + seed % 7)}
    result = attend(batch, options | more, implementation=implementation)
    return _compare(result, dense_oracle(real, **options), batch, options | more)


def _compare(result, expected, batch: Batch, options: Mapping[str, Any]) -> float:
    out, lse = result
    logit_size = max(1.0, abs(batch.sm_scale) * batch.q.shape[-1] ** 0.5)
    turned: Any = {"is_turned": options.get("rope") is not None, "sm_scale": batch.sm_scale}
    if options.get("out_dtype") is None:
        return assert_attention_close(
            out, lse, *expected, logit_size=logit_size, roundings=_roundings(out, options),
            **turned,
        )  # fmt: skip
    dtype, scale = jnp.dtype(options["out_dtype"]), float(options["out_scale"])
    info = jnp.finfo(dtype)
    exact = np.clip(expected[0] / scale, -float(info.max), float(info.max))
    got = np.asarray(out).astype(np.float64)
    # Half a step of the 8-bit dtype, and the error that the result has before it is rounded.
    half_step = np.maximum(np.abs(exact) * float(info.eps), float(info.smallest_subnormal)) / 2
    norm = np.linalg.norm(expected[0], axis=-1, keepdims=True) / scale
    peak = np.abs(expected[0]).max(initial=0) / scale
    relative, of_peak = TOLERANCES[jnp.dtype(batch.q.dtype).name]
    allowed = half_step * 1.001 + relative * norm + of_peak * peak
    error = np.abs(got - exact)
    share = float(np.max(error / np.where(allowed > 0, allowed, 1), initial=0))
    assert not np.isnan(got).any(), "an 8-bit output is NaN"
    assert share <= 1, f"8-bit output: the error is {share:.3g} times what is allowed"
    nothing = np.zeros(expected[0].shape, batch.q.dtype)  # out was compared above
    assert_attention_close(nothing, lse, 0 * expected[0], expected[1], **turned)
    return share


def _close(result, expected) -> float:
    (out, lse), (exact, exact_lse) = result, expected
    few = _roundings(out)
    return assert_attention_close(out, lse, exact, exact_lse, roundings=few)


def _roundings(out: Any, options: Mapping[str, Any] = MappingProxyType({})) -> int:
    """How often a result of attention counts as rounded.

    AVX-512 with BF16 and tensor cores round the weights, too. Over few elements of V this does not
    average out: exact sums of such weights were off by 4.7e-3 of the norm in one of 16 heads. Nor
    does it where one key has nearly all of the weight and this is no power of two: beside a sink,
    or times its token's scale of V. A bf16 weight is then off by 2^-8 = 3.9e-3 at most.
    """
    alone = options.get("sinks") is not None or np.ndim(options.get("v_scale", 0.0)) > 2
    return 2 if out.dtype.itemsize == 2 and (out.shape[-1] < 32 or alone) else 1


# Holes are wild page ids, too. A distance of 2^31 tokens is no number that ALiBi can work with.
_WITHOUT = {"kv": None, "scale": None, "holes": False, "alibi": False}
VALUES = {
    name: values for name, values in ATTENTION.items() if name not in (*_WITHOUT, "out_dtype")
} | {"wild": ("page_table", "seq_lens", "cu_q_lens", "num_seqs", "layer", "tree", "window", "all")}


def _wild_attention(row: Row, seed: int, implementation: Any) -> float:
    """Any integers at all: what they mean is in the docstrings, and nothing else is read."""
    rng = np.random.default_rng([seed, 5])
    batch, _, options, _ = attention_case({**row, **_WITHOUT}, seed, capacity=420)
    clean = {name: getattr(batch, name) for name in ("q", "k_pages", "v_pages")}
    clean = {k: np.where(np.isnan(x), x.dtype.type(0.5), x) for k, x in clean.items()}
    batch = dataclasses.replace(batch, **clean)

    def wild(x, share=0.4):
        x = np.asarray(x)
        return np.where(rng.random(x.shape) < share, rng.choice(WILD, x.shape), x).astype(np.int32)

    def is_wild(name):
        return row["wild"] in (name, "all")

    for name in ("page_table", "seq_lens", "cu_q_lens"):
        if is_wild(name):
            batch = dataclasses.replace(batch, **{name: wild(getattr(batch, name))})
    if is_wild("num_seqs"):
        batch = dataclasses.replace(batch, num_seqs=int(rng.choice(WILD)))
    if is_wild("layer") and batch.layer is not None:
        batch = dataclasses.replace(batch, layer=int(rng.choice(WILD)))
    if is_wild("tree") and "tree" in options:
        options |= {name: wild(options[name]) for name in ("tree", "tree_sizes")}
    if is_wild("window"):
        options["sliding_window"] = wild(np.full(len(batch.seq_lens), 9), 0.7)
    result = attend(batch, options, implementation=implementation)
    return _compare(result, dense_oracle(batch, **options), batch, options)


MLA = {
    "sizes": ((48, 32), (576, 512), (24, 24), (40, 8)),
    "heads": (1, 5, 16, 128),
    "dtype": DTYPES,
    "kv": (None, *FP8, "int8"),
    "page_size": (8, 1, 5, 64),
    "causal": (True, False),
    "stacked": (False, True),
    "split": ((), ("num_kv_splits", 3), ("split_tokens", 64)),
    "rows": (([1, 1], [200, 33]), ([1, 0, 7, 1], [70, 9, 30, 0]), ([20], [130])),
}


def _mla(row: Row, seed: int, implementation: Any) -> float:
    q_lens, seq_lens = row["rows"]
    width, v_head_dim = row["sizes"]
    batch = mla.make_mla(
        width, v_head_dim, row["heads"], q_lens, seq_lens, dtype=row["dtype"],
        page_size=row["page_size"], num_layers=2 if row["stacked"] else None,
        causal=row["causal"], num_tokens=sum(q_lens) + 3, seed=seed,
    )  # fmt: skip
    options: dict[str, Any] = dict([row["split"]]) if row["split"] else {}
    real = batch
    if row["kv"] is not None:
        options["kv_scale"] = np.float32(0.03 if row["kv"] == "int8" else 0.1)
        batch, real = mla.eight_bit(batch, row["kv"], options["kv_scale"])
    result = mla.attend(batch, implementation=implementation, **options)
    return _close(result, dense_oracle(real))


RAGGED = {
    "dtype": DTYPES,
    "sizes": ((6, 2, 32, 24), (4, 4, 64, None), (8, 1, 128, None), (3, 3, 80, 40)),
    "rows": (([1, 1], [90, 7]), ([7, 1, 0, 3, 40], [7, 80, 4, 1, 70]), ([33], [200])),
    "causal": (True, False),
    "sliding_window": (None, 5, 64),
    **LOGIT_FACTORS,
    "alibi": (False, True),
    "sinks": (False, True),
    "tree": (False, True),
    "dead": (0, 1),
}


def _ragged(row: Row, seed: int, implementation: Any) -> float:
    heads, kv_heads, dim, v_dim = row["sizes"]
    case = Case("flat", heads, kv_heads, dim, v_head_dim=v_dim, causal=row["causal"])
    q_lens, kv_lens = row["rows"]
    made = flat.make_flat(
        q_lens, kv_lens, case=case, dtype=row["dtype"], live=len(q_lens) - row["dead"], seed=seed
    )
    rng = np.random.default_rng([seed, 1])
    options: dict[str, Any] = {name: row[name] for name in ("sliding_window", *LOGIT_FACTORS)}
    if row["alibi"]:
        options["alibi_slopes"] = np.float32(rng.uniform(0.001, 0.5, heads))
    if row["sinks"]:
        options["sinks"] = rng.standard_normal(heads, "f4")
    if row["tree"] and row["causal"]:
        sizes = (min(n, int(rng.integers(q, q + 9))) for q, n in zip(q_lens, kv_lens, strict=True))
        options |= trees_of([random_parents(rng, size, "forest") for size in sizes])
    result = made.attend(implementation=implementation, **options)
    return _close(result, dense_oracle(made.paged, **options))


CASCADE = {
    "dtype": DTYPES,
    "sizes": ((6, 2, 32), (4, 4, 64), (8, 1, 128)),
    "page_size": (8, 1, 16),
    "rows": (2, 5, 9),
    "num_levels": (2, 3, 4),
    "queries": ("one", "few"),
    **LOGIT_FACTORS,
}


def _cascade(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    heads, kv_heads, dim = row["sizes"]
    case = Case("shared", heads, kv_heads, dim, page_size=row["page_size"])
    pattern = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(row["rows"])]
    q_lens = list(rng.integers(0, 4, row["rows"])) if row["queries"] == "few" else None
    last = min(3, row["page_size"])
    if q_lens is not None:
        lengths = [(len(pages) - 1) * row["page_size"] + last for pages in pattern]
        q_lens = [min(q, n) for q, n in zip(q_lens, lengths, strict=True)]
    batch = cascade.share(
        pattern, last=last, q_lens=q_lens, dtype=row["dtype"], case=case, seed=seed
    )
    q, k_pages, v_pages, page_table, seq_lens = batch.operands()
    cu_q_lens, num_seqs = jnp.asarray(batch.cu_q_lens), jnp.int32(batch.num_seqs)
    levels = cascade_levels(
        page_table, seq_lens, cu_q_lens, num_seqs, page_size=row["page_size"],
        num_levels=row["num_levels"],
    )  # fmt: skip
    options = {name: row[name] for name in LOGIT_FACTORS}
    result = cascade_attention(
        q, k_pages, v_pages, levels, cu_q_lens, num_seqs, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip
    (out, lse), expected = result, dense_oracle(batch, **options)
    # The parts are rounded, and what they are merged to at each level but the first.
    return assert_attention_close(out, lse, *expected, roundings=row["num_levels"])


MERGE = {
    "dtype": DTYPES,
    "head_dim": (64, 8, 24, 80, 128, 512),
    "tokens": (1, 7, 300),
    "num_q_heads": (3, 1, 32),
    "gap": (0.0, 5.0, 80.0),
}


def _merge(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng(seed)
    shape = (row["tokens"], row["num_q_heads"], row["head_dim"])
    outs = [rng.standard_normal(shape, "f4").astype(jnp.dtype(row["dtype"])) for _ in "ab"]
    lses = [rng.uniform(-row["gap"] / 2, row["gap"] / 2, shape[:2]).astype("f4") for _ in "ab"]
    a, lse_a, b, lse_b = map(jnp.asarray, (outs[0], lses[0], outs[1], lses[1]))
    merged = merge_attention_states(a, lse_a, b, lse_b, implementation=implementation)
    lse = np.logaddexp(*(x.astype("f8") for x in lses))
    weights = [np.exp(x.astype("f8") - lse)[..., None] for x in lses]
    expected = sum(w * x.astype("f8") for w, x in zip(weights, outs, strict=True))
    return assert_attention_close(*merged, expected, lse)


READS = {
    "attention": Op(ATTENTION, _attention, weight=12),
    "mla": Op(MLA, _mla, weight=2),
    "ragged_attention": Op(RAGGED, _ragged, weight=2),
    "cascade_attention": Op(CASCADE, _cascade),
    "merge_attention_states": Op(MERGE, _merge),
}
WILD_READS = {"attention, wild integers": Op(VALUES, _wild_attention, weight=3)}
