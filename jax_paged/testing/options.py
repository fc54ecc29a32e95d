# SPDX-License-Identifier: Apache-2.0
"""Attention calls that combine any of the options, as rows of a table, with float64 beside them.

A row names a value of each of `ATTENTION_FACTORS`. `attention_case` makes a call from it, with its
contents drawn from a seed. Pools, padding and whatever no window shows are NaN.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import LAYOUTS, POOLS, of_slots_first, pool_of_v, slots_first
from jax_paged.ops.attention import paged_attention, ragged_paged_attention
from jax_paged.ops.trees import tree_intervals

from .cases import WILD_PAGE, Batch, Case, make_batch

# Static options that change single logits, with values to test: each value goes to the op and to
# the oracle as it is.
LOGIT_FACTORS: dict[str, tuple[Any, ...]] = {"soft_cap": (None, 0.7, 30.0)}

ATTENTION_FACTORS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 1, 7, 64, 150, 2**31 - 1, -1, "per row"),
    "pinned": (None, None, 3, 40, "slid"),
    "rope": (None, None, "half", "interleaved", "short"),
    "tree": (False, False, True),
    **LOGIT_FACTORS,
    "alibi": (False, True),
    "sinks": (None, "moderate", "large", "none"),
    "causal": (True, False),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv": (None, None, "float8_e4m3fn", "float8_e5m2", "int8"),
    "scale": (None, "scalar", "head", "token"),
    "layout": LAYOUTS,
    "page_size": (1, 5, 16, 32),
    "group": (1, 2, 4, 5, 8, 24),
    "head_dim": ((64, None), (40, 128), (128, 72)),
    "split": ((), ("num_kv_splits", 1), ("num_kv_splits", 3), ("split_tokens", 48)),
    "rows": ("decode", "short", "prefill", "mixed"),
    "sm_scale": (None, 0.0, -0.3),
    "stacked": (False, True),
    "holes": (False, False, True),
}


def cover_pairs(
    factors: Mapping[str, Sequence[Any]], num_rows: int, seed: int
) -> tuple[dict[str, Any], ...]:
    """num_rows rows or more: first those that cover the pairs, greedily, then random ones."""
    rng = np.random.default_rng(seed)

    def draw():
        return {name: int(rng.integers(len(values))) for name, values in factors.items()}

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(factors, 2)}

    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        a, i, b, j = min(missing)
        best = max(
            (draw() | {a: i, b: j} for _ in range(12)), key=lambda row: len(pairs(row) & missing)
        )
        missing -= pairs(best)
        rows.append(best)
    rows += [draw() for _ in range(num_rows - len(rows))]
    return tuple({name: factors[name][i] for name, i in row.items()} for row in rows)


def random_parents(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Parents of `size` nodes: a chain, a tree, a forest, or a tree with its nodes in any order."""
    node = np.arange(size)
    if kind == "chain":
        return node - 1
    low = 0 if kind == "tree" else -1
    return np.array([rng.integers(low, i) if i else -1 for i in node], np.int64)


def trees_of(parents: list[np.ndarray], max_tree: int = 70) -> dict[str, np.ndarray]:
    """The options of the op: intervals and sizes of rows of parents, wild behind each tree."""
    wild = np.full((len(parents), max_tree), 2**31 - 1, np.int32)
    for row, found in enumerate(parents):
        wild[row, : len(found)] = found
    sizes = np.array([len(x) for x in parents], np.int32)
    tree, _, status = tree_intervals(jnp.asarray(wild), jnp.asarray(sizes))
    assert not np.asarray(status).any()
    tree = np.asarray(tree).copy()
    behind = np.arange(max_tree) >= sizes[:, None]
    tree[behind] = np.array([-(2**31), 2**31 - 1])
    return {"tree": tree, "tree_sizes": sizes}


def lengths(kind: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Query and KV lengths of a batch: of one token per row, of a few, of many, or of all kinds."""
    if kind == "decode":
        return [1, 1, 1, 1], [int(rng.integers(1, 400)), 0, 64, 1]
    if kind == "short":
        return [3, 2, 4], [int(rng.integers(4, 300)), 2, 1]
    if kind == "prefill":
        return [40, 7], [40, 130]
    return [1, 33, 0, 2, 5], [200, int(rng.integers(33, 150)), 17, 0, 3]


def hidden_pages(batch: Batch, options: dict[str, Any]) -> np.ndarray:
    """bool[S, pages_per_seq]: pages that no query of their row sees, for the window's sake."""
    page, rows = batch.case.page_size, batch.seq_lens.shape
    of_rows = (options.get(x) for x in ("sliding_window", "num_pinned", "slot_offset"))
    window, pinned, offset = (
        np.broadcast_to(np.int64(0 if x is None else x), rows)[:, None] for x in of_rows
    )
    column = np.arange(batch.page_table.shape[1])
    stored = np.clip(batch.seq_lens[:, None] - offset, 0, len(column) * page)
    trees = np.broadcast_to(options.get("tree_sizes", 0), rows)[:, None]
    query = np.minimum(stored - np.diff(batch.cu_q_lens)[:, None], stored - trees)
    first = query - np.maximum(window - pinned, 1) + 1
    return (window > 0) & ((column + 1) * page <= first) & (column * page >= pinned)


def poison(batch: Batch, options: dict[str, Any]) -> Batch:
    """Writes NaN into every page that the windows of its row hide."""
    ids = batch.page_table[hidden_pages(batch, options)]
    ids = ids[(ids >= 0) & (ids < batch.v_pages.shape[-4])]
    k_pages, v_pages = batch.k_pages.copy(), batch.v_pages.copy()
    for pages in (k_pages, v_pages):
        (pages if batch.layer is None else pages[batch.layer])[ids] = np.nan
    return dataclasses.replace(batch, k_pages=k_pages, v_pages=v_pages)


def eight_bit(batch: Batch, kv: str, kind: str | None, rng: np.random.Generator):
    """A batch stored in 8 bits: (as the op gets it, with what that means for the oracle, scales).

    NaN stays NaN in fp8; int8 has none, so there the unused slots hold garbage, with NaN as their
    scale where each token has its own.
    """
    case, num_layers = batch.case, batch.case.num_layers
    layers = () if num_layers is None else (num_layers,)
    size = {"float8_e4m3fn": 0.1, "float8_e5m2": 0.1, "int8": 0.03}[kv]
    shape = {
        None: (), "scalar": layers, "head": (*layers, case.num_kv_heads),
        "token": (*layers, batch.v_pages.shape[-4], case.num_kv_heads, case.page_size),
    }[kind]  # fmt: skip
    stored, real, scales = {}, {}, {}
    for name in POOLS:
        pages = slots_first(getattr(batch, f"{name}_pages"), case.layout, name).astype(np.float64)
        scale = np.asarray(rng.uniform(0.7, 1.4, shape) * size if kind else 1, np.float32)
        # The scale of each value: [layers, pages, slots, heads, 1].
        wide = {
            None: lambda x: x, "token": lambda x: np.swapaxes(x, -2, -1)[..., None],
            "scalar": lambda x: x.reshape(*layers, 1, 1, 1, 1),
            "head": lambda x: x.reshape(*layers, 1, 1, case.num_kv_heads, 1),
        }[kind](scale)  # fmt: skip
        limit = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}[kv]
        codes = np.clip(pages / wide, -limit, limit)
        if kv == "int8":
            codes = np.nan_to_num(np.rint(codes), nan=-97)
            if kind == "token":
                scale[np.swapaxes(np.isnan(pages).all(-1), -2, -1)] = np.nan
        codes = codes.astype(jnp.dtype(kv))
        exact = np.where(np.isnan(pages), np.nan, codes.astype(np.float64) * wide)
        for made, x in ((stored, codes), (real, exact)):
            made[name] = x
        scales[f"{name}_scale"] = scale
    if kind is None:
        scales = {}

    def as_pages(made: dict[str, Any]) -> Batch:
        k_pages, v_pages = of_slots_first(made["k"], made["v"], case.layout)
        v_pages = pool_of_v(k_pages, v_pages, case.layout)
        return dataclasses.replace(batch, k_pages=k_pages, v_pages=v_pages)

    return as_pages(stored), as_pages(real), scales


def with_holes(batch: Batch, rng: np.random.Generator) -> Batch:
    """The batch with a third of its page ids out of range."""
    holes = rng.random(batch.page_table.shape) < 0.3
    wild = rng.choice(np.array([-1, WILD_PAGE], np.int32), holes.shape)
    return dataclasses.replace(batch, page_table=np.where(holes, wild, batch.page_table))


def draw_sinks(kind: str, num_q_heads: int, rng: np.random.Generator) -> np.ndarray:
    """Sinks about as large as the logits, larger than most, or of no weight."""
    sinks = {"moderate": 1.0, "large": 4.0, "none": -np.inf}[kind]
    sinks = sinks + (rng.standard_normal(num_q_heads) if np.isfinite(sinks) else 0)
    return np.broadcast_to(np.float32(sinks), (num_q_heads,))


def attention_case(
    row: Mapping[str, Any], seed: int, *, capacity: int | None = None
) -> tuple[Batch, Batch, dict[str, Any], dict[str, Any]]:
    """A row of the table: the op's batch, the oracle's, options of both, and of the op alone.

    With a capacity in tokens, the shapes depend on the row alone and not on the seed.
    """
    rng = np.random.default_rng([seed, 9])
    num_kv_heads = 1 if row["group"] == 24 else 2
    head_dim, v_head_dim = row["head_dim"]
    if row["kv"] is not None and row["layout"] == "vllm5d":  # 16 bytes are so many dimensions
        head_dim = -(-head_dim // 16) * 16
    num_q_heads = num_kv_heads * row["group"]
    case = Case(
        "pairwise", num_q_heads, num_kv_heads, head_dim, row["page_size"], v_head_dim,
        row["layout"], 2 if row["stacked"] else None, row["causal"] or row["rows"] == "decode",
    )  # fmt: skip
    q_lens, seq_lens = lengths(row["rows"], rng)
    pool_sizes: dict[str, Any] = {}
    if capacity is not None:
        pages = -(-capacity // case.page_size)
        pool_sizes = {"pages_per_seq": pages, "num_pages": len(seq_lens) * pages + 3}
    batch = make_batch(
        case, jnp.dtype(row["dtype"]), q_lens, seq_lens, num_tokens=sum(q_lens) + 2, seed=seed,
        **pool_sizes,
    )  # fmt: skip
    if row["sm_scale"] is not None:
        batch = dataclasses.replace(batch, sm_scale=row["sm_scale"])
    if row["holes"]:
        batch = with_holes(batch, rng)
    options: dict[str, Any] = {name: row.get(name, off[0]) for name, off in LOGIT_FACTORS.items()}
    options["sliding_window"] = row["sliding_window"]
    if row["sliding_window"] == "per row":
        options["sliding_window"] = rng.choice(np.array([0, 1, 30, 90], np.int32), len(seq_lens))
    if row["pinned"] is not None:
        slid = row["pinned"] == "slid"
        options["num_pinned"] = rng.choice(np.array([0, 9, 17], np.int32), len(seq_lens))
        if not slid:
            options["num_pinned"] = np.full(len(seq_lens), row["pinned"], np.int32)
        offsets = [0, 64, 1000] if slid else [0]
        offset = rng.choice(np.array(offsets, np.int32), len(seq_lens))
        options["slot_offset"] = np.where(batch.seq_lens > 0, offset, 0).astype(np.int32)
        batch = dataclasses.replace(batch, seq_lens=batch.seq_lens + options["slot_offset"])
    if row["rope"]:
        style = "half" if row["rope"] == "short" else row["rope"]
        half = min(12, head_dim // 2)
        positions = np.arange(70 if row["rope"] == "short" else 1500)
        angles = np.outer(positions, 0.3 ** np.arange(half))
        options["rope"] = (np.float32(np.cos(angles)), np.float32(np.sin(angles)), style)
    if row["tree"] and case.causal:
        sizes = [int(rng.integers(0, min(12, n) + 1)) for n in seq_lens]
        options |= trees_of([random_parents(rng, n, "forest") for n in sizes], max_tree=16)
    batch = poison(batch, options)
    if row["alibi"]:
        options["alibi_slopes"] = np.float32(2.0 ** -np.linspace(1, 8, num_q_heads))
    if row["sinks"]:
        options["sinks"] = draw_sinks(row["sinks"], num_q_heads, rng)
    split = dict([row["split"]]) if row["split"] else {}
    if row["kv"] is None:
        return batch, batch, options, split
    stored, real, scales = eight_bit(batch, row["kv"], row["scale"], rng)
    return stored, real, options, split | scales


def attend(batch: Batch, options: dict[str, Any], **more):
    """The op on a batch: `paged_attention` where each row has one query and nothing is padded."""
    arguments, defaults = batch.ragged()
    given = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    call: dict[str, Any] = defaults | given | more | {"return_lse": True}
    one_each = (np.diff(batch.cu_q_lens) == 1).all() and len(batch.q) == len(batch.seq_lens)
    if one_each and batch.num_seqs == len(batch.seq_lens) and call.pop("causal"):
        return paged_attention(*arguments[:5], **call)
    return ragged_paged_attention(*arguments, **call)
