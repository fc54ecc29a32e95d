# SPDX-License-Identifier: Apache-2.0
"""Which tokens the windows of a batch show, and that kernels asked for no others. Not a test."""

import numpy as np

from jax_paged.layout import pages_shape, slots_first


def windows_begin(batch, window: int) -> np.ndarray:
    """i64[S]: the first token of each row that some query sees; seq_len in rows without a query."""
    case, rows = batch.case, len(batch.seq_lens)
    seq_lens = np.clip(batch.seq_lens, 0, batch.page_table.shape[1] * case.page_size)
    bounds = np.maximum.accumulate(np.clip(batch.cu_q_lens, 0, len(batch.q)))
    q_lens = np.where(np.arange(rows) < batch.num_seqs, np.diff(bounds), 0)
    first = seq_lens.astype(np.int64) - q_lens - window + 1
    return np.where(q_lens > 0, np.maximum(first, 0) if window > 0 else 0, seq_lens)


def tokens_of(batch, begins, ends) -> np.ndarray:
    """bool[num_pages, page_size]: the slots of tokens [begins[row], ends[row]) of the rows."""
    page = batch.case.page_size
    slots = np.zeros((pages_shape(batch.k_pages, batch.case.layout, "k").num_pages, page), bool)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for token in range(begin, min(end, batch.page_table.shape[1] * page)):
            page_id = batch.page_table[row, token // page]
            if 0 <= page_id < len(slots):
                slots[page_id, token % page] = True
    return slots


def assert_reads_windows_only(batch, window: int, buffers) -> None:
    """Kernels asked for the tokens from where a row's windows begin, and for nothing else.

    `buffers`: of an `emulate` on pages without a layer axis. Of vllm5d V is loaded by 8 tokens.
    """
    begins = windows_begin(batch, window)
    for name in ("k", "v"):
        touched = slots_first(buffers[f"{name}_touched"], batch.case.layout, name).any((-2, -1))
        by = 8 if name == "v" and batch.case.layout == "vllm5d" else 1
        allowed = tokens_of(batch, begins // by * by, -(-batch.seq_lens // by) * by)
        assert not (touched & ~allowed).any(), f"{name}_pages: read outside of the windows"
        needed = tokens_of(batch, begins, batch.seq_lens)
        assert touched[needed].all(), f"{name}_pages: tokens in a window not read"
