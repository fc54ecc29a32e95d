"""Test data and oracles, shared by the tests and the benchmarks.

Batches are hostile: pages in random order, every slot that no sequence owns is NaN, unused table
entries are wild, there are empty rows, dead rows and padding tokens.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    POOLS,
    Layout,
    PagesShape,
    Pool,
    from_slots_first,
    make_shape,
    pages_shape,
    slots_first,
)
from jax_paged.rope import RopeStyle

WILD_PAGE = 2_147_480_000
MAX_DRAWN = 16_777_213  # random numbers of an array, a prime: a longer one repeats them, shifted


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of an attention batch, named after the model (or the trap) they come from."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    v_head_dim: int | None = None
    layout: Layout = "HND"
    num_layers: int | None = None
    causal: bool = True


CASES = {
    case.name: case
    for case in (
        Case("qwen3_30b_a3b", 32, 4, 128),
        Case("llama3_8b", 32, 8, 128),
        Case("smollm2_135m", 9, 3, 64),
        Case("gemma_mqa", 8, 1, 256),
        Case("phi_mha", 4, 4, 80),
        Case("wide_group", 71, 1, 64),
        Case("page_544", 8, 2, 64, page_size=544),
    )
}

# Relative error per token and head, and maximal error relative to max|out|. Rounding the exact
# answer to the output dtype costs about half of each; the rest is for the order of f32 sums.
TOLERANCES = {
    "bfloat16": (4e-3, 2.0**-7),
    "float16": (8e-4, 2.0**-10),
    "float32": (1e-5, 2.0**-16),
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """The operands of one ragged call, as numpy arrays (pages and q in the dtype under test)."""

    case: Case
    q: np.ndarray  # [T, Hq, D]
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray  # i32[S, pages_per_seq]
    seq_lens: np.ndarray  # i32[S]
    cu_q_lens: np.ndarray  # i32[S + 1]
    num_seqs: int
    layer: int | None
    sm_scale: float

    def operands(self) -> tuple[jax.Array, ...]:
        """q, k_pages, v_pages, page_table, seq_lens as device arrays."""
        arrays = (self.q, self.k_pages, self.v_pages, self.page_table, self.seq_lens)
        return tuple(jnp.asarray(x) for x in arrays)

    def ragged(self) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """Positional and keyword arguments for `ragged_paged_attention`."""
        arguments = (*self.operands(), jnp.asarray(self.cu_q_lens), jnp.int32(self.num_seqs))
        options = {
            "layer": None if self.layer is None else jnp.int32(self.layer),
            "sm_scale": jnp.float32(self.sm_scale),
            "layout": self.case.layout,
            "causal": self.case.causal,
        }
        return arguments, options


def make_batch(
    case: Case, dtype: Any, q_lens, seq_lens, *, num_tokens: int | None = None,
    num_seqs: int | None = None, pages_per_seq: int | None = None, num_pages: int | None = None,
    shared_pages: bool = False, uniform: float | None = None, seed: int = 0,
) -> Batch:  # fmt: skip
    """Builds a hostile batch.

    Args:
      q_lens, seq_lens: new tokens and KV length per row. Rows from num_seqs on are dead: what is
        given for them is replaced by wild values.
      num_tokens: length of the flat batch (default: what the live rows need; more = NaN padding).
      num_pages: of the pool (default three more than the rows own). If fewer, then rows share
        pages, in another order each.
      shared_pages: rows share the pages of their common full prefix with row 0.
      uniform: q, K and V are uniform within ±uniform; None: standard normal.
    """
    rng = np.random.default_rng(seed)
    rows, page = len(seq_lens), case.page_size
    num_seqs = rows if num_seqs is None else num_seqs
    pages_of = [-(-int(n) // page) for n in seq_lens[:num_seqs]]
    pages_per_seq = max([*pages_of, 1]) if pages_per_seq is None else pages_per_seq
    num_pages = sum(pages_of) + 3 if num_pages is None else num_pages
    free = np.resize(rng.permutation(num_pages)[::-1], sum(pages_of))
    table = rng.choice(np.array([-1, WILD_PAGE, -7, num_pages], np.int32), (rows, pages_per_seq))
    owned = np.zeros((num_pages, page), bool)
    for row, count in enumerate(pages_of):
        length, shared = int(seq_lens[row]), 0
        if shared_pages and row:
            shared = min(length, int(seq_lens[0])) // page
            table[row, :shared] = table[0, :shared]
        table[row, shared:count], free = np.split(free, [count - shared])
        owned[table[row, :count]] |= np.arange(count * page).reshape(count, page) < length

    def draw(size: tuple[int, ...]) -> np.ndarray:
        count = min(math.prod(size), MAX_DRAWN)
        if uniform is None:
            numbers = rng.standard_normal(count, "f4")
        else:
            numbers = np.float32(uniform) * (2 * rng.random(count, "f4") - 1)
        return np.resize(numbers.astype(dtype), size)

    shape = PagesShape(case.num_layers, num_pages, case.num_kv_heads, page, case.head_dim)
    layer = None if case.num_layers is None else int(rng.integers(case.num_layers))

    def pages(head_dim: int, pool: Pool) -> np.ndarray:
        array = np.full(make_shape(shape._replace(head_dim=head_dim), "NHD"), np.nan, dtype)
        view = array if layer is None else array[layer]  # [page, slot, head, dim]
        view[owned] = draw((owned.sum(), case.num_kv_heads, head_dim))
        return np.ascontiguousarray(from_slots_first(array, case.layout, pool))

    ends = np.cumsum(q_lens[:num_seqs], dtype=np.int32)
    used_tokens = int(ends[-1]) if num_seqs else 0
    num_tokens = used_tokens if num_tokens is None else num_tokens
    wild = np.array([-5, 0, num_tokens, 2**31 - 1], np.int32)
    seq_lens = np.concatenate([seq_lens[:num_seqs], rng.choice(wild, rows - num_seqs)])
    cu_q_lens = np.concatenate([[0], ends, rng.choice(wild, rows - num_seqs)])
    q = draw((num_tokens, case.num_q_heads, case.head_dim))
    q[used_tokens:] = np.nan
    v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
    return Batch(
        case=case, q=q, k_pages=pages(case.head_dim, "k"), v_pages=pages(v_head_dim, "v"),
        page_table=table, seq_lens=seq_lens.astype(np.int32), cu_q_lens=cu_q_lens.astype(np.int32),
        num_seqs=num_seqs, layer=layer, sm_scale=float(case.head_dim**-0.5),
    )  # fmt: skip


def dense_oracle(
    batch: Batch,
    *,
    sliding_window=None,
    num_pinned=0,
    slot_offset=0,
    soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    tree=None,
    tree_sizes=None,
    rope=None,
    queries=None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention in float64 over the tokens that exist: (out [T, Hq, Dv], lse [T, Hq]).

    The options are those of `ragged_paged_attention`. Wild values mean what the ops promise: a page
    id out of range holds no tokens, lengths are clamped to the capacity, cu_q_lens to be monotone
    and within [0, T]. With `queries`, indices of tokens, only these are computed.
    """
    case, group = batch.case, batch.case.num_q_heads // batch.case.num_kv_heads
    v_head_dim = pages_shape(batch.v_pages, case.layout, "v").head_dim
    out = np.zeros((*batch.q.shape[:2], v_head_dim))
    lse = np.full(batch.q.shape[:2], -np.inf)
    per_head = (case.num_kv_heads, group, 1, 1)
    slope = 0.0 if alibi_slopes is None else np.float64(alibi_slopes).reshape(per_head)
    sink = np.full(per_head, -np.inf) if sinks is None else np.float64(sinks).reshape(per_head)
    if batch.layer is not None and not 0 <= batch.layer < batch.k_pages.shape[0]:
        batch = dataclasses.replace(  # nothing is stored
            batch, layer=0, page_table=np.full_like(batch.page_table, -1)
        )

    k_pages, v_pages = (
        slots_first(pages if batch.layer is None else pages[batch.layer], case.layout, pool)
        for pages, pool in zip((batch.k_pages, batch.v_pages), POOLS, strict=True)
    )
    bounds = np.maximum.accumulate(np.clip(batch.cu_q_lens, 0, len(batch.q)))
    of_rows = (0 if sliding_window is None else sliding_window, num_pinned, slot_offset)
    windows = [np.broadcast_to(np.clip(x, 0, None), batch.seq_lens.shape) for x in of_rows]
    for row in range(min(batch.num_seqs, len(batch.seq_lens))):
        start, end = bounds[row : row + 2]
        window, pinned, offset = (int(x[row]) for x in windows)
        capacity = batch.page_table.shape[1] * case.page_size
        length = np.clip(int(batch.seq_lens[row]) - offset, 0, capacity)  # what is stored
        key = np.arange(length)
        page = batch.page_table[row, key // case.page_size]
        key = key[(page >= 0) & (page < len(k_pages))]
        mine = np.arange(start, end)
        if queries is not None:
            mine = mine[np.isin(mine, queries)]
        query = length - end + mine
        sees = np.ones((len(mine), len(key)), bool)
        if case.causal:
            sees &= key <= query[:, None]
        position = np.arange(length)
        if tree is not None and tree_sizes is not None:
            size = int(np.clip(tree_sizes[row], 0, min(tree.shape[1], length)))
            of_tree = ancestors(np.clip(tree[row, :size], 0, size))
            position[length - size :] = length - size + of_tree.sum(1) - of_tree.diagonal()
            for i, j in np.argwhere((query[:, None] >= length - size) & (key >= length - size)):
                sees[i, j] &= of_tree[query[i] - (length - size), key[j] - (length - size)]
        position += np.where(np.arange(length) < pinned, 0, offset)
        at = np.where(query < 0, query, np.append(position, 0)[np.maximum(query, 0)])
        distance = position[key] - at[:, None]
        if window > 0:
            sees &= (distance > -max(window - pinned, 1)) | (key < pinned)
        if rope is not None:
            known = [(x >= 0) & (x < len(rope[0])) for x in (at, position[key])]
            sees &= known[0][:, None] & known[1]
        kept = sees.any(0)  # what no query sees may be NaN
        key, sees, distance = key[kept], sees[:, kept], distance[:, kept]
        if not len(mine) or (not len(key) and sinks is None):
            continue
        where = (batch.page_table[row, key // case.page_size], key % case.page_size)
        k = k_pages[where].astype(np.float64).transpose(1, 2, 0)  # [Hkv, D, keys]
        v = v_pages[where].astype(np.float64).transpose(1, 0, 2)  # [Hkv, keys, Dv]
        q = batch.q[mine].astype(np.float64)
        if rope is not None:
            q = turned(q, np.clip(at, 0, len(rope[0]) - 1), *rope)
            k = turned(k.transpose(2, 0, 1), position[key], *rope).transpose(1, 2, 0)
        q = q.reshape(len(mine), case.num_kv_heads, group, -1)
        logits = q.transpose(1, 2, 0, 3) @ k[:, None] * batch.sm_scale  # [Hkv, group, t, keys]
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        logits = np.where(sees, logits + slope * distance, -np.inf)
        top = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
        top = np.maximum(top, sink)
        shift = np.where(np.isneginf(top), 0, top)
        weights = np.exp(logits - shift)
        total = weights.sum(-1, keepdims=True) + np.exp(sink - shift)
        safe = np.where(total > 0, total, 1)
        row_lse = np.where(total > 0, top + np.log(safe), -np.inf)
        row_out = weights @ v[:, None] / safe
        out[mine] = row_out.transpose(2, 0, 1, 3).reshape(len(mine), case.num_q_heads, -1)
        lse[mine] = row_lse.transpose(2, 0, 1, 3).reshape(len(mine), case.num_q_heads)
    return out, lse


def turned(x: np.ndarray, position: np.ndarray, cos, sin, style: RopeStyle) -> np.ndarray:
    """Tokens [tokens, heads, dim] with rotary embedding in float64, by tables of all positions."""
    cos, sin = (np.asarray(table, np.float64)[position][:, None] for table in (cos, sin))
    half = cos.shape[-1]
    pairs = np.arange(2 * half).reshape((2, half) if style == "half" else (half, 2))
    first, second = pairs if style == "half" else pairs.T
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def ancestors(intervals: np.ndarray) -> np.ndarray:
    """bool[n, n]: whether node i sees node j, by their intervals [n, 2] in depth-first order."""
    first, end = np.asarray(intervals).T
    sees = (first <= first[:, None]) & (first[:, None] < end)
    return sees & np.tri(len(first), dtype=bool)


def assert_attention_close(out, lse, expected, expected_lse, *, logit_size: float = 1.0) -> None:
    """Compares with the oracle: tolerances of `TOLERANCES`; rows without a key exactly 0.

    Such rows are those where the expected out is 0: their lse is −inf, or their sink.

    logit_size: standard deviation of the logits before the softmax, where it is far from 1. Their
    rounding in f32, which is all of an f32 result's error, grows with it.
    """
    dtype = jnp.dtype(out.dtype)
    tolerance, peak_tolerance = TOLERANCES[dtype.name]
    if dtype == np.float32:
        tolerance, peak_tolerance = tolerance * logit_size, peak_tolerance * logit_size
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)
    assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} outputs are not finite"
    np.testing.assert_array_equal(
        np.isneginf(lse), np.isneginf(expected_lse), err_msg="lse: empty rows"
    )
    empty = (expected == 0).all(-1)
    np.testing.assert_array_equal(out[empty], 0, err_msg="out: empty rows")
    if empty.all():
        return
    # Below the normal numbers a dtype has steps of one size: 2^-24 of f16, where outputs can be so
    # small. Half a step is the rounding of the exact answer, as above. What is below the normal
    # numbers of f32 (of a key far below a sink) XLA and the kernels take for 0.
    least = max(float(jnp.finfo(dtype).smallest_subnormal) / 2, float(jnp.finfo(jnp.float32).tiny))
    norm = np.linalg.norm(expected, axis=-1)
    error = np.linalg.norm(out - expected, axis=-1) - least * out.shape[-1] ** 0.5
    # Of a row beside a large sink even the norm in f64 can be 0: then the step alone counts.
    relative = np.divide(error, norm, out=np.where(error > 0, np.inf, 0.0), where=norm > 0)
    worst = np.unravel_index(np.argmax(relative), relative.shape)
    assert relative[worst] <= tolerance, (
        f"relative error {relative[worst]:.3g} > {tolerance:.3g} at token, head {worst}"
    )
    peak = np.abs(out - expected).max()
    limit = peak_tolerance * np.abs(expected).max() + least
    assert peak <= limit, f"largest error {peak:.3g} > {limit:.3g}"
    finite = ~np.isneginf(expected_lse)
    np.testing.assert_allclose(
        lse[finite], expected_lse[finite], rtol=2e-7, atol=2e-5 * logit_size, err_msg="lse"
    )


def is_in_place(compiled: jax.stages.Compiled, pool: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a compiled program never makes an array as large as `pool` beside the donated one.

    Looks in the optimised HLO for pool-sized copies, selects, fusions and the like; a custom call,
    parameter, tuple access, bitcast, while or call passes the pool on without touching it.
    """
    return not pool_sized_ops(compiled, pool)


def pool_sized_ops(
    compiled: jax.stages.Compiled, pool: jax.Array | jax.ShapeDtypeStruct
) -> list[str]:
    """The HLO lines of `compiled` that write a new array with as many elements as `pool`.

    What is inside of a fusion is never written; the fusion itself counts.
    """
    passes = {
        "custom-call", "parameter", "get-tuple-element", "bitcast", "tuple", "while", "call",
        "conditional", "opt-barrier",
    }  # fmt: skip
    size, text = math.prod(pool.shape), compiled.as_text() or ""
    fused = set(re.findall(r" fusion\(.*? calls=(%?[\w.-]+)", text))
    found, inside = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            inside = line.split(" ", 1)[0] in fused
        if inside:
            continue
        match = re.match(r"\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match and match[2] not in passes:
            shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
            if any(math.prod(map(int, shape.split(","))) >= size for shape in shapes):
                found.append(line.strip())
    return found
