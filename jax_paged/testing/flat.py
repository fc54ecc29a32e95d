# SPDX-License-Identifier: Apache-2.0
"""Rows of plain K and V, one after another, for `ragged_attention`."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.attention import ragged_attention

from .cases import Batch, Case, make_batch

CASE = Case("flat", 6, 2, 32, v_head_dim=24)


@dataclasses.dataclass(frozen=True)
class Flat:
    """A batch over flat K and V, and the same batch with each token as a page for the oracle."""

    k: np.ndarray
    v: np.ndarray
    cu_kv_lens: np.ndarray
    paged: Batch

    def attend(self, **options):
        paged = self.paged
        return ragged_attention(
            jnp.asarray(paged.q), jnp.asarray(self.k), jnp.asarray(self.v),
            jnp.asarray(paged.cu_q_lens), jnp.asarray(self.cu_kv_lens), paged.num_seqs,
            causal=paged.case.causal, return_lse=True, **options,
        )  # fmt: skip


def make_flat(q_lens, kv_lens, *, case=CASE, dtype="float32", live=None, padding=3, seed=0):
    """Rows laid one after another; padding tokens are NaN, and dead rows have wild bounds."""
    live = len(kv_lens) if live is None else live
    batch = make_batch(
        case, jnp.dtype(dtype), q_lens, kv_lens, num_seqs=live,
        num_tokens=sum(q_lens[:live]) + padding, seed=seed,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    used = sum(kv_lens[:live])
    v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
    k, v = (
        rng.standard_normal((used + padding, case.num_kv_heads, dim), "f4").astype(batch.q.dtype)
        for dim in (case.head_dim, v_head_dim)
    )
    k[used:], v[used:] = np.nan, np.nan
    starts = np.cumsum([0, *kv_lens[:live]])
    wild = rng.choice(np.array([-5, 0, used, 2**31 - 1]), len(kv_lens) - live)
    table = np.full((len(kv_lens), max([*kv_lens, 1])), -1, np.int32)
    for row in range(live):
        table[row, : kv_lens[row]] = np.arange(starts[row], starts[row + 1])
    paged = dataclasses.replace(
        batch, case=dataclasses.replace(case, layout="NHD", page_size=1), k_pages=k[:, None],
        v_pages=v[:, None], page_table=table,
    )  # fmt: skip
    return Flat(k, v, np.concatenate([starts, wild]).astype(np.int32), paged)
