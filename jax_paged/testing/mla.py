# SPDX-License-Identifier: Apache-2.0
"""MLA calls whose latent pages are the K pages of a `Batch`."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.mla import mla_paged_attention

from .cases import Case, make_batch


def make_mla(
    width, v_head_dim, heads, q_lens, seq_lens, *, dtype="float32", page_size=8, **options
):
    """A batch whose K pages are the latent pages; its V pages are for the oracle alone."""
    case = Case("mla", heads, 1, width, page_size, num_layers=options.pop("num_layers", None),
                causal=options.pop("causal", True))  # fmt: skip
    batch = make_batch(case, jnp.dtype(dtype), q_lens, seq_lens, **options)
    return dataclasses.replace(batch, v_pages=batch.k_pages[..., :v_head_dim], sm_scale=0.08)


def attend(batch, **options):
    (q, k_pages, v_pages, *rows), given = batch.ragged()
    options = {"layer": given["layer"], "causal": batch.case.causal} | options
    return mla_paged_attention(
        q, jnp.squeeze(k_pages, -3), *rows, sm_scale=batch.sm_scale, return_lse=True,
        v_head_dim=v_pages.shape[-1], **options,
    )  # fmt: skip


def eight_bit(batch, kv_dtype, scale):
    """The batch with its rows in 8 bits, and as the oracle sees it."""
    limit = 127 if kv_dtype == "int8" else float(jnp.finfo(kv_dtype).max)
    codes = np.clip(np.float32(batch.k_pages) / scale, -limit, limit)
    if kv_dtype == "int8":
        codes = np.nan_to_num(np.rint(codes), nan=-97)
    codes = codes.astype(jnp.dtype(kv_dtype))
    real = np.where(np.isnan(batch.k_pages), np.nan, codes.astype(np.float64) * scale)
    v_head_dim = batch.v_pages.shape[-1]
    return (
        dataclasses.replace(batch, k_pages=codes, v_pages=codes[..., :v_head_dim]),
        dataclasses.replace(batch, k_pages=real, v_pages=real[..., :v_head_dim]),
    )
