"""KV pages of all layers together with their page table, and the verbs on both.

The verbs are those of `pages` under the same names, with the same statuses. They take a `KVState`
and return a new one. Only `fork`, `truncate` and `commit_tree` touch the pages: they copy the few
pages that change hands, or the few tokens that are kept, in place when the caller's jit donates the
state. Called eagerly, these three donate the pages of the state that they are given: use the
returned one.

Hand `k_pages` and `v_pages` to the ops whole, with a `layer` scalar: slicing out a layer copies it.
After a write, put the returned arrays back with `dataclasses.replace(state, k_pages=, v_pages=)`;
with 8-bit pages hand over and put back k_scale and v_scale, too. Scales per token lie by page and
slot as the pages do, and the verbs copy them with their pages.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.cache import pages
from jax_paged.cache.pages import Integers, PageCopies, PageTable, SlotMoves, StepBatch
from jax_paged.cache.table import check_kind
from jax_paged.checks import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    check_choice,
    check_kv_scale,
    check_size,
    expect,
    is_per_token,
)
from jax_paged.layout import LAYOUTS, Layout, PagesShape, make_shape, pages_rank, pages_shape
from jax_paged.ops.move import copy_pages, copy_rows, move_slots
from jax_paged.ops.zero_pool import zero_pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """The KV cache of a model: one K and one V pool, stacked over layers, and one page table."""

    k_pages: jax.Array  # [num_layers, num_pages, num_kv_heads, page_size, head_dim] for "HND"
    v_pages: jax.Array  # the same with v_head_dim
    table: PageTable
    layout: Layout = field(metadata={"static": True})
    # Of 8-bit pages, for the ops' arguments of these names: f32[num_layers, num_pages,
    # num_kv_heads, page_size], one per token and head, or one that is given. None: 1.
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    def __post_init__(self):
        if len(getattr(self.k_pages, "shape", ())) == pages_rank(self.layout) + 1:
            shape = pages_shape(self.k_pages, self.layout)
            sizes = shape.num_pages, shape.page_size
            check_table_fits(self.table, sizes, "k_pages", self.k_pages, self.layout)

    @staticmethod
    def create(
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        max_seqs: int,
        pages_per_seq: int,
        dtype: Any,
        v_head_dim: int | None = None,
        layout: Layout = "HND",
        max_tree: int = 256,
        windows: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> "KVState":
        """An empty state with zeroed pages.

        Args:
          num_layers, num_kv_heads, head_dim: of the model, at least 1.
          num_pages, page_size, max_seqs, pages_per_seq, max_tree, windows: see `PageTable.create`.
            All layers share one page table, so a page id stands for num_layers pages.
          dtype: of both pools: bf16, f16, f32, f8e4m3fn, f8e5m2 or int8 (see `kv_dtype`).
          v_head_dim: head_dim of V; None = head_dim.
          layout: "HND", "NHD" or "vllm5d" (not with 8-bit pages), see `layout`.
          k_scale, v_scale: of 8-bit pages: a scalar, [num_layers] or [num_layers, num_kv_heads].
            None for both: pools of scales, one per token and head, which the writes compute; they
            add 8 bytes per token, head and layer to the 2 · head_dim of K and V.

        Raises:
          ValueError: a size, the dtype, the layout or a scale is wrong.

        >>> state = KVState.create(num_layers=2, num_pages=8, page_size=16, num_kv_heads=4,
        ...                        head_dim=64, max_seqs=2, pages_per_seq=4, dtype="bfloat16")
        >>> state, status = reserve(state, [0], 20)
        >>> state.k_pages.shape, int(pages.num_free_pages(state.table))
        ((2, 8, 4, 16, 64), 6)
        """
        table = PageTable.create(
            num_pages, max_seqs, pages_per_seq, page_size, max_tree=max_tree, windows=windows
        )
        check_choice("layout", layout, LAYOUTS)
        check_pages_dtype(dtype)
        shape = PagesShape(
            num_layers=check_size("num_layers", num_layers),
            num_pages=table.num_pages,
            num_kv_heads=check_size("num_kv_heads", num_kv_heads),
            page_size=table.page_size,
            head_dim=check_size("head_dim", head_dim),
        )
        v_head_dim = shape.head_dim if v_head_dim is None else check_size("v_head_dim", v_head_dim)
        is_eight_bit = dtype in EIGHT_BIT_DTYPES
        expect(not is_eight_bit or layout != "vllm5d", "layout", "'HND' or 'NHD'", repr(layout))
        expect((k_scale is None) == (v_scale is None), "v_scale", "given as k_scale is", v_scale)
        k_pages = zero_pool(make_shape(shape, layout, "k", dtype=dtype), jnp.dtype(dtype))
        v_shape = shape._replace(head_dim=v_head_dim)
        v_pages = zero_pool(make_shape(v_shape, layout, "v"), jnp.dtype(dtype))
        if is_eight_bit and k_scale is None:
            scale_shape = make_shape(shape, "HND")[:-1]
            k_scale, v_scale = (zero_pool(scale_shape, jnp.dtype("float32")) for _ in "kv")
        else:
            k_scale = check_kv_scale("k_scale", k_scale, k_pages, shape)
            v_scale = check_kv_scale("v_scale", v_scale, v_pages, shape)
            k_scale, v_scale = (
                None if x is None else jnp.array(x, jnp.float32) for x in (k_scale, v_scale)
            )  # each leaf is a buffer of its own
        return KVState(k_pages, v_pages, table, layout, k_scale, v_scale)


def check_table_fits(
    table: Any, sizes: tuple[int, int], name: str, pages: Any, layout: Layout | None = None
) -> None:
    """Checks a state's table against (num_pages, page_size) of its pool `pages`.

    States of other leaves pass, e.g. of shardings, or with an axis in front: pytrees may be so.
    Every call of a program makes a state, so texts are made for an error alone.
    """
    if len(getattr(getattr(table, "ref_counts", None), "shape", ())) != 1:
        return
    have = table.num_pages, table.page_size
    if have != sizes:
        text = "num_pages={} and page_size={}"
        where = f"{name} {list(pages.shape)}" + (f" of layout {layout!r}" if layout else "")
        expect(False, "table", f"{text.format(*sizes)} as in {where}", text.format(*have))


def check_pages_dtype(dtype: Any) -> None:
    """Checks the dtype of pools to be made."""
    allowed = FLOAT_DTYPES + EIGHT_BIT_DTYPES
    names = " or ".join(d.name for d in allowed)
    expect(dtype is not None and dtype in allowed, "dtype", names, dtype)


def reserve(state: KVState, rows: Integers, num_tokens: Integers) -> tuple[KVState, jax.Array]:
    """Makes room for num_tokens[i] more tokens in row i: `pages.reserve`."""
    check_kind("state", state, KVState)
    table, status = pages.reserve(state.table, rows, num_tokens)
    return dataclasses.replace(state, table=table), status


def step_batch(
    state: KVState, rows: Integers, q_lens: Integers, *, num_tokens: int | None = None,
    tree_parents: Integers | None = None,
) -> tuple[KVState, StepBatch, jax.Array]:  # fmt: skip
    """Appends q_lens[i] tokens to row i and tells where they go: `pages.step_batch`."""
    check_kind("state", state, KVState)
    table, batch, status = pages.step_batch(
        state.table, rows, q_lens, num_tokens=num_tokens, tree_parents=tree_parents
    )
    return dataclasses.replace(state, table=table), batch, status


def release(state: KVState, rows: Integers) -> tuple[KVState, jax.Array]:
    """Frees rows: `pages.release`. What the pages hold stays until it is overwritten."""
    check_kind("state", state, KVState)
    table, status = pages.release(state.table, rows)
    return dataclasses.replace(state, table=table), status


def fork(
    state: KVState, parent: Integers, child: Integers, length: Integers
) -> tuple[KVState, jax.Array]:
    """Starts the free row child[i] with the first length[i] tokens of row parent[i].

    `pages.fork`, and the last page is copied where `length` fills it only partly.
    """
    check_kind("state", state, KVState)
    table, copies, status = pages.fork(state.table, parent, child, length)
    return _with_copies(state, table, copies), status


def truncate(state: KVState, rows: Integers, num_tokens: Integers) -> tuple[KVState, jax.Array]:
    """Drops the last num_tokens[i] tokens of row i and the pages behind the new end.

    `pages.truncate`, and the last page is copied where other rows hold it too.
    """
    check_kind("state", state, KVState)
    table, copies, status = pages.truncate(state.table, rows, num_tokens)
    return _with_copies(state, table, copies), status


def commit_tree(state: KVState, rows: Integers, leaves: Integers) -> tuple[KVState, jax.Array]:
    """Keeps the path to node leaves[i] of row i's tree and drops the other nodes.

    `pages.commit_tree`, and the tokens of the path are moved to where the tree began.
    """
    check_kind("state", state, KVState)
    table, moves, status = pages.commit_tree(state.table, rows, leaves)
    return _with_moves(state, table, moves), status


def set_window(
    state: KVState, rows: Integers, window: Integers, num_pinned: Integers
) -> tuple[KVState, jax.Array]:
    """Gives live rows a sliding window: `pages.set_window`."""
    check_kind("state", state, KVState)
    table, status = pages.set_window(state.table, rows, window, num_pinned)
    return dataclasses.replace(state, table=table), status


def hold(state: KVState, rows: Integers, columns: Integers) -> tuple[KVState, jax.Array, jax.Array]:
    """Keeps full pages of rows beyond their release: `pages.hold`."""
    check_kind("state", state, KVState)
    table, page_ids, status = pages.hold(state.table, rows, columns)
    return dataclasses.replace(state, table=table), page_ids, status


def unhold(state: KVState, page_ids: Integers) -> tuple[KVState, jax.Array]:
    """Gives back references that `hold` took: `pages.unhold`."""
    check_kind("state", state, KVState)
    table, status = pages.unhold(state.table, page_ids)
    return dataclasses.replace(state, table=table), status


def adopt(state: KVState, rows: Integers, page_ids: Any) -> tuple[KVState, jax.Array]:
    """Starts free rows with pages on hold: `pages.adopt`."""
    check_kind("state", state, KVState)
    table, status = pages.adopt(state.table, rows, page_ids)
    return dataclasses.replace(state, table=table), status


def reset(state: KVState) -> KVState:
    """Frees all rows: `pages.reset`. What the pages hold stays until it is overwritten."""
    check_kind("state", state, KVState)
    return dataclasses.replace(state, table=pages.reset(state.table))


def _with_copies(state: KVState, table: PageTable, copies: PageCopies) -> KVState:
    k_pages, v_pages = copy_pages(
        state.k_pages, state.v_pages, copies.src, copies.dst, stacked=True
    )
    k_scale, v_scale = state.k_scale, state.v_scale
    if is_per_token(k_scale, k_pages):
        k_scale, v_scale = copy_rows(2, (k_scale, v_scale), *copies)
    return KVState(k_pages, v_pages, table, state.layout, k_scale, v_scale)


def _with_moves(state: KVState, table: PageTable, moves: SlotMoves) -> KVState:
    per_token = is_per_token(state.k_scale, state.k_pages)
    k_scale, v_scale = (state.k_scale, state.v_scale) if per_token else (None, None)
    k_pages, v_pages, *moved = move_slots(
        state.k_pages, state.v_pages, *moves, k_scale=k_scale, v_scale=v_scale, stacked=True,
        layout=state.layout,
    )  # fmt: skip
    k_scale, v_scale = moved or (state.k_scale, state.v_scale)
    return KVState(k_pages, v_pages, table, state.layout, k_scale, v_scale)
