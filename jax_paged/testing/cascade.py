# SPDX-License-Identifier: Apache-2.0
"""Batches whose rows share pages, for `cascade_attention`."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from .cases import Case, make_batch

CASE = Case("shared", 6, 2, 32, page_size=8)


def share(pattern, *, last=3, q_lens=None, dtype="float32", case=CASE, seed=0):
    """A batch whose rows share the pages that `pattern` says; `last` tokens on each last page."""
    page = case.page_size
    seq_lens = [(len(pages) - 1) * page + last for pages in pattern]
    q_lens = [1] * len(pattern) if q_lens is None else q_lens
    batch = make_batch(case, jnp.dtype(dtype), q_lens, seq_lens, num_tokens=sum(q_lens) + 2,
                       seed=seed)  # fmt: skip
    table, owner = batch.page_table.copy(), {}
    for row, pages in enumerate(pattern):
        for place, letter in enumerate(pages):
            table[row, place] = owner.setdefault((place, letter), table[row, place])
    # A page that several rows share holds as many tokens as its fullest reader says.
    pools = [batch.k_pages.copy(), batch.v_pages.copy()]
    rng = np.random.default_rng(seed)
    for row, length in enumerate(seq_lens):
        for token in range(length):
            place = (table[row, token // page], slice(None), token % page)
            for pool in pools:
                pool[place] = rng.standard_normal(pool[place].shape).astype(pool.dtype)
    return dataclasses.replace(batch, k_pages=pools[0], v_pages=pools[1], page_table=table)
