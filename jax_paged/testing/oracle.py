# SPDX-License-Identifier: Apache-2.0
"""Softmax attention in float64, and how far a result may be from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_paged.checks import RopeStyle
from jax_paged.layout import POOLS, pages_shape, slots_first

from .cases import Batch

# Relative error per token and head, and maximal error relative to max|out|. Rounding the exact
# answer to the output dtype costs about half of each; the rest is for the order of f32 sums.
TOLERANCES = {
    "bfloat16": (4e-3, 2.0**-7),
    "float16": (8e-4, 2.0**-10),
    "float32": (1e-5, 2.0**-16),
}


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
            q, k = (as_stored(x, y.dtype) for x, y in ((q, batch.q), (k, batch.k_pages)))
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


def as_stored(x: np.ndarray, dtype) -> np.ndarray:
    """x as pages of a 16-bit dtype would hold it, by way of f32 as the ops come there."""
    is_rounded = jnp.dtype(dtype).itemsize == 2
    return x.astype(np.float32).astype(dtype).astype(np.float64) if is_rounded else x


def ancestors(intervals: np.ndarray) -> np.ndarray:
    """bool[n, n]: whether node i sees node j, by their intervals [n, 2] in depth-first order."""
    first, end = np.asarray(intervals).T
    sees = (first <= first[:, None]) & (first[:, None] < end)
    return sees & np.tri(len(first), dtype=bool)


def assert_attention_close(
    out, lse, expected, expected_lse, *, logit_size: float = 1.0, roundings: int = 1,
    is_turned: bool = False, sm_scale: float | None = None,
) -> float:  # fmt: skip
    """Compares with the oracle: tolerances of `TOLERANCES`; rows without a key exactly 0.

    Such rows are those where the expected out is 0: their lse is −inf, or their sink.

    Args:
      logit_size: standard deviation of the logits before the softmax, where it is far from 1. Their
        rounding in f32, which is all of an f32 result's error, grows with it.
      roundings: how often a result was rounded to its dtype on its way: half of a tolerance each.
      is_turned: whether rope was inside attention. Of an element that lies in the middle between
        two 16-bit numbers, the f32 sums of a kernel decide where it is rounded to. That moves a
        logit, and a lse where few keys are seen, by a step of the dtype times |q_d k_d sm_scale|,
        where |q_d k_d| is 2 at most for all but one in a hundred.
      sm_scale: where it is not logit_size / √head_dim, of V's head_dim.

    Returns:
      The largest error, as a share of what is allowed: ≤ 1.
    """
    dtype = jnp.dtype(out.dtype)
    tolerance, peak_tolerance = (x * (1 + roundings) / 2 for x in TOLERANCES[dtype.name])
    if dtype == np.float32:
        tolerance, peak_tolerance = tolerance * logit_size, peak_tolerance * logit_size
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)
    assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} outputs are not finite"
    np.testing.assert_array_equal(
        np.isneginf(lse), np.isneginf(expected_lse), err_msg="lse: empty rows"
    )
    empty = (expected == 0).all(-1)
    np.testing.assert_array_equal(out[empty], 0, err_msg="out: empty rows")
    if not expected.size:
        return 0.0
    # Below the normal numbers a dtype has steps of one size: 2^-24 of f16, where outputs can be so
    # small. Half a step is the rounding of the exact answer, as above. What is below the normal
    # numbers of f32 (of a key far below a sink) XLA and the kernels take for 0.
    least = max(float(jnp.finfo(dtype).smallest_subnormal) / 2, float(jnp.finfo(jnp.float32).tiny))
    norm = np.linalg.norm(expected, axis=-1)
    error = np.linalg.norm(out - expected, axis=-1) - least * out.shape[-1] ** 0.5
    # Of a row beside a large sink even the norm in f64 can be 0: then the step alone counts.
    relative = np.divide(error, norm, out=np.where(error > 0, np.inf, 0.0), where=norm > 0)
    # The logits that count are about as large as lse. Three roundings in f32 (the product, the sum
    # with a bias, the difference from the maximum) make a weight wrong by as much, relatively.
    finite = ~np.isneginf(expected_lse)
    of_logits = 3 * 2.0**-24 * np.abs(np.where(finite, expected_lse, 0))
    shares = relative / (tolerance + of_logits)
    worst = np.unravel_index(np.argmax(shares), shares.shape)
    assert shares[worst] <= 1, (
        f"relative error {relative[worst]:.3g} > {tolerance + of_logits[worst]:.3g} at token, head "
        f"{tuple(map(int, worst))}"
    )
    peak = np.abs(out - expected).max()
    limit = (peak_tolerance + of_logits.max()) * np.abs(expected).max() + least
    assert peak <= limit, f"largest error {peak:.3g} > {limit:.3g}"
    lse, expected_lse = lse[finite], expected_lse[finite]
    lse_limit = 2e-5 * logit_size + 2e-7 * np.abs(expected_lse)
    if is_turned:
        scale = logit_size / out.shape[-1] ** 0.5 if sm_scale is None else abs(sm_scale)
        lse_limit = lse_limit + 2 * float(jnp.finfo(dtype).eps) * scale
    lse_share = float(np.max(np.abs(lse - expected_lse) / lse_limit, initial=0))
    assert lse_share <= 1, f"lse: the error is {lse_share:.3g} times what is allowed"
    return max(float(shares[worst]), float(peak / limit), lse_share)
