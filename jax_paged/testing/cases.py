# SPDX-License-Identifier: Apache-2.0
"""Test data: batches of named sizes with hostile contents.

Pages lie in random order, every slot that no sequence owns is NaN, unused table entries are wild,
and there are empty rows, dead rows and padding tokens.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.layout import Layout, PagesShape, is_one_pool, make_shape, of_slots_first, pool_of_v

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
    v_head_dim: int | None = None  # None, or layout "rpa": head_dim
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


@dataclasses.dataclass(frozen=True)
class Batch:
    """The operands of one ragged call, as numpy arrays (pages and q in the dtype under test)."""

    case: Case
    q: np.ndarray  # [T, Hq, D]
    k_pages: np.ndarray
    v_pages: np.ndarray  # of layout "rpa": k_pages
    page_table: np.ndarray  # i32[S, pages_per_seq]
    seq_lens: np.ndarray  # i32[S]
    cu_q_lens: np.ndarray  # i32[S + 1]
    num_seqs: int
    layer: int | None
    sm_scale: float

    def operands(self) -> tuple[Any, ...]:
        """q, k_pages, v_pages, page_table, seq_lens as device arrays, v_pages as the op has it."""
        v_pages = None if is_one_pool(self.case.layout) else jnp.asarray(self.v_pages)
        arrays = (self.q, self.k_pages, self.page_table, self.seq_lens)
        q, k_pages, *rows = (jnp.asarray(x) for x in arrays)
        return (q, k_pages, v_pages, *rows)

    def alone(self, row: int) -> "Batch":
        """One of its rows as a batch of its own."""
        begin, end = self.cu_q_lens[row : row + 2]
        return dataclasses.replace(
            self,
            q=self.q[begin:end],
            page_table=self.page_table[row : row + 1],
            seq_lens=self.seq_lens[row : row + 1],
            cu_q_lens=np.array([0, end - begin], np.int32),
            num_seqs=1,
        )

    def ragged(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
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

    def tokens(head_dim: int) -> np.ndarray:
        array = np.full(make_shape(shape._replace(head_dim=head_dim), "NHD"), np.nan, dtype)
        view = array if layer is None else array[layer]  # [page, slot, head, dim]
        view[owned] = draw((owned.sum(), case.num_kv_heads, head_dim))
        return array

    ends = np.cumsum(q_lens[:num_seqs], dtype=np.int32)
    used_tokens = int(ends[-1]) if num_seqs else 0
    num_tokens = used_tokens if num_tokens is None else num_tokens
    wild = np.array([-5, 0, num_tokens, 2**31 - 1], np.int32)
    seq_lens = np.concatenate([seq_lens[:num_seqs], rng.choice(wild, rows - num_seqs)])
    cu_q_lens = np.concatenate([[0], ends, rng.choice(wild, rows - num_seqs)])
    q = draw((num_tokens, case.num_q_heads, case.head_dim))
    q[used_tokens:] = np.nan
    v_head_dim = case.v_head_dim
    if v_head_dim is None or is_one_pool(case.layout):
        v_head_dim = case.head_dim
    k_pages, v_pages = of_slots_first(tokens(case.head_dim), tokens(v_head_dim), case.layout)
    k_pages = np.ascontiguousarray(k_pages)
    v_pages = np.ascontiguousarray(pool_of_v(k_pages, v_pages, case.layout))
    return Batch(
        case=case, q=q, k_pages=k_pages, v_pages=v_pages,
        page_table=table, seq_lens=seq_lens.astype(np.int32), cu_q_lens=cu_q_lens.astype(np.int32),
        num_seqs=num_seqs, layer=layer, sm_scale=float(case.head_dim**-0.5),
    )  # fmt: skip
