"""KV pages of layers of different kinds: for each kind a group, with pools and a page table.

A layer sees all tokens ("full"), only the last few (a window), or one latent row per token ("mla").
Layers of one kind form a group, stored as `KVState` or `MlaState` stores it; a layer with a window
frees the pages that have left it, so its pools need room for a window and a chunk per row and no
more. A state may have the layers of one pipeline stage only.

The verbs are those of `state` under the same names. Each is done on the page table of every group,
for all of them or for none: a row's status is the first that is not OK, in the order of the groups,
and when a row fails in one group, nothing changes in any. To keep only the rows that are OK may
take several calls: a row may have lived on pages of one group that a row would have freed which
failed in another. Rows, their lengths and handles are the same in all groups, so for what `pages`
tells of them any group's table will do; `num_free_pages` and `peak_pages_in_use` are per group.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_paged.cache import pages
from jax_paged.cache.pages import Integers, PageCopies, PageTable, SlotMoves, Status, StepBatch
from jax_paged.cache.state import (
    KVState,
    _with_copies,
    _with_moves,
    check_pages_dtype,
    check_table_fits,
)
from jax_paged.cache.table import all_ok, check_kind, check_rows, per_row
from jax_paged.cache.windows import loses_window
from jax_paged.checks import INT32_MAX, check_shape, check_size, expect
from jax_paged.checks.status import code
from jax_paged.layout import Layout
from jax_paged.ops.mla import check_latent_scale
from jax_paged.ops.move import copy_rows
from jax_paged.ops.zero_pool import zero_pool

# "full": K and V of all tokens. An int: K and V of a window of so many tokens, the query's own
# included. "mla": latent rows of all tokens.
LayerKind = Literal["full", "mla"] | int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MlaState:
    """The cache of MLA layers: one pool of latent rows, stacked over layers, and one page table."""

    kv_pages: jax.Array  # [num_layers, num_pages, page_size, latent + rope]
    table: PageTable
    kv_scale: jax.Array | None = None  # of 8-bit pages: f32, a scalar or [num_layers]; None: 1

    def __post_init__(self):
        shape = getattr(self.kv_pages, "shape", ())
        if len(shape) == 4:
            check_table_fits(self.table, shape[1:3], "kv_pages", self.kv_pages)

    @staticmethod
    def create(
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        latent_dim: int,
        max_seqs: int,
        pages_per_seq: int,
        dtype: Any,
        max_tree: int = 256,
        kv_scale: Any = None,
    ) -> "MlaState":
        """An empty state with zeroed pages.

        Args:
          num_layers: of the model, at least 1.
          num_pages, page_size, max_seqs, pages_per_seq, max_tree: see `PageTable.create`.
          latent_dim: the width of a row, latent + rope.
          dtype: of the pool, as for `KVState.create`.
          kv_scale: of 8-bit pages, as for `mla_paged_attention`.

        Raises:
          ValueError: a size, the dtype or the scale is wrong.
        """
        table = PageTable.create(num_pages, max_seqs, pages_per_seq, page_size, max_tree=max_tree)
        check_pages_dtype(dtype)
        num_layers = check_size("num_layers", num_layers)
        latent_dim = check_size("latent_dim", latent_dim)
        shape = (num_layers, table.num_pages, table.page_size, latent_dim)
        kv_pages = zero_pool(shape, jnp.dtype(dtype))
        kv_scale = check_latent_scale(kv_scale, kv_pages)
        kv_scale = None if kv_scale is None else jnp.array(kv_scale, jnp.float32)
        return MlaState(kv_pages, table, kv_scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVGroups:
    """The KV cache of a range of layers of different kinds, a group for each kind."""

    groups: tuple[KVState | MlaState, ...]  # in the order in which their kinds first occur
    layer_kinds: tuple[LayerKind, ...] = field(metadata={"static": True})
    layer_begin: int = field(metadata={"static": True}, default=0)  # the first layer of the range

    @staticmethod
    def create(
        *,
        layer_kinds: Sequence[LayerKind],
        num_pages: int | Mapping[LayerKind, int],
        pages_per_seq: int | Mapping[LayerKind, int],
        page_size: int,
        max_seqs: int,
        dtype: Any,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        latent_dim: int | None = None,
        layer_begin: int = 0,
        layout: Layout = "HND",
        max_tree: int = 256,
        k_scale: float | None = None,
        v_scale: float | None = None,
        kv_scale: float | None = None,
    ) -> "KVGroups":
        """An empty state with zeroed pages.

        Args:
          layer_kinds: of each layer "full", "mla" or the size of its window.
          num_pages, pages_per_seq: see `PageTable.create`; for every group, or one for each kind
            (also for kinds that only other stages have). A row of a group with a window holds up to
            pages_for(window + chunk, page_size) + 1 pages where `reserve` brings `chunk` tokens.
          page_size, max_seqs, max_tree: of every group, see `PageTable.create`.
          dtype, layout, num_kv_heads, head_dim, v_head_dim, k_scale, v_scale: of the layers with K
            and V, see `KVState.create`; scales are scalars.
          latent_dim, kv_scale: of "mla" layers: the width of a row, latent + rope, and the factor
            of 8-bit ones. Their dtype is `dtype`, too.
          layer_begin: the number in the model of the first of these layers.

        Raises:
          ValueError: a kind, a size, the dtype, the layout or a scale is wrong.

        >>> state = KVGroups.create(layer_kinds=["full", 32, 32], num_pages={"full": 64, 32: 8},
        ...                         pages_per_seq={"full": 64, 32: 4}, page_size=16, max_seqs=2,
        ...                         num_kv_heads=4, head_dim=64, dtype="bfloat16")
        >>> state.place(2), state.groups[1].k_pages.shape
        ((1, 1), (2, 8, 4, 16, 64))
        """
        kinds = tuple(layer_kinds)
        for kind in kinds:
            is_window = isinstance(kind, int) and not isinstance(kind, bool)
            ok = kind in ("full", "mla") or (is_window and 1 <= kind <= INT32_MAX)
            expect(ok, "layer_kinds", "each 'full', 'mla' or an int of at least 1", repr(kind))
        expect(len(kinds) > 0, "layer_kinds", "at least one layer", repr(layer_kinds))
        ok = isinstance(layer_begin, int) and layer_begin >= 0
        expect(ok, "layer_begin", "an integer of at least 0", repr(layer_begin))
        of_tables = {"page_size": page_size, "max_seqs": max_seqs, "max_tree": max_tree}
        of_heads = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        groups, each = [], _per_kind(kinds, num_pages=num_pages, pages_per_seq=pages_per_seq)
        for kind, own in each.items():
            options: dict[str, Any] = {"num_layers": kinds.count(kind), "dtype": dtype}
            options |= of_tables | own
            if kind == "mla":
                options |= {"latent_dim": latent_dim, "kv_scale": kv_scale}
                groups.append(MlaState.create(**options))
            else:
                options |= of_heads | {"layout": layout, "k_scale": k_scale, "v_scale": v_scale}
                groups.append(KVState.create(**options, windows=kind != "full"))
        return KVGroups(tuple(groups), kinds, layer_begin)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each group."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def layers(self) -> range:
        """The numbers of these layers in the model."""
        return range(self.layer_begin, self.layer_begin + len(self.layer_kinds))

    def place(self, layer: int) -> tuple[int, int]:
        """Where a layer of the model is: its group, and its number in the pools of that group."""
        expect(layer in self.layers, "layer", f"one of {self.layers}", layer)
        number = layer - self.layer_begin
        kind = self.layer_kinds[number]
        return self.kinds.index(kind), self.layer_kinds[:number].count(kind)


def _per_kind(kinds: tuple[LayerKind, ...], **sizes: Any) -> dict[LayerKind, dict[str, int]]:
    """For each kind the sizes, of which each is one number or a mapping of kinds to numbers."""
    wanted = list(dict.fromkeys(kinds))
    for name, size in sizes.items():
        if isinstance(size, Mapping):
            expect(set(size) >= set(wanted), name, f"a size for each of {wanted}", list(size))
    return {
        kind: {n: x[kind] if isinstance(x, Mapping) else x for n, x in sizes.items()}
        for kind in wanted
    }


# A verb as it is done in a group: (window, table, ids) → (table, result, status). The window is 0
# where the group has none; `result` is what the verb gives besides.
_Verb = Callable[[int, PageTable, jax.Array], tuple[PageTable, Any, jax.Array]]


def _do(state: KVGroups, ids: jax.Array, verb: _Verb) -> tuple[list[PageTable], list, jax.Array]:
    """Does a verb on every group's table, or, if any of `ids` fails in any, with all of them -1.

    So nothing is ever selected after the fact: a row that takes no part changes nothing. The first
    round is for its statuses alone, and the compiler drops the rest of it.
    """
    check_kind("state", state, KVGroups)
    windows = [kind if isinstance(kind, int) else 0 for kind in state.kinds]
    pairs = [(window, group.table) for window, group in zip(windows, state.groups, strict=True)]
    status = jnp.zeros(ids.shape, jnp.int32)
    for window, table in pairs:
        status = jnp.where(status == code(Status.OK), verb(window, table, ids)[-1], status)
    ids = jnp.where(all_ok(status), ids, -1)
    tables, results, _ = zip(*(verb(window, table, ids) for window, table in pairs), strict=True)
    return list(tables), list(results), status


def _with_tables(state: KVGroups, tables: Sequence[PageTable]) -> KVGroups:
    pairs = zip(state.groups, tables, strict=True)
    groups = tuple(dataclasses.replace(group, table=table) for group, table in pairs)
    return dataclasses.replace(state, groups=groups)


def _give_windows(window: int, table: PageTable) -> PageTable:
    """Live rows of a group with a window have that window, the others none."""
    if table.windows is None:
        return table
    of_rows = jnp.where(table.is_live, jnp.int32(window), 0)
    return dataclasses.replace(table, windows=dataclasses.replace(table.windows, window=of_rows))


def reserve(state: KVGroups, rows: Integers, num_tokens: Integers) -> tuple[KVGroups, jax.Array]:
    """Makes room for num_tokens[i] more tokens in row i: `pages.reserve`.

    In a group with a window this frees the pages that the row's next token does not see.
    """

    def verb(window, table, ids):
        table, status = pages.reserve(table, ids, num_tokens)
        return _give_windows(window, table), None, status

    tables, _, status = _do(state, check_rows("rows", rows), verb)
    return _with_tables(state, tables), status


def step_batch(
    state: KVGroups, rows: Integers, q_lens: Integers, *, num_tokens: int | None = None,
    tree_parents: Integers | None = None,
) -> tuple[KVGroups, tuple[StepBatch, ...], jax.Array]:  # fmt: skip
    """Appends q_lens[i] tokens to row i and tells where they go: `pages.step_batch`.

    Gives a batch for each group. What is said of rows and tokens is the same in all of them; pages,
    slots and windows are the group's own. An op on layer l takes those of `state.place(l)`.

    Raises NotImplementedError for tree_parents where there are "mla" layers: no MLA op takes trees.
    """
    ids = check_rows("rows", rows)
    size = ids.shape[0] if num_tokens is None else num_tokens

    if tree_parents is not None and "mla" in getattr(state, "kinds", ()):
        raise NotImplementedError(
            "tree_parents: expected None for a state with 'mla' layers, whose attention takes no "
            "trees, got parents"
        )

    def verb(window, table, ids):
        return pages.step_batch(table, ids, q_lens, num_tokens=size, tree_parents=tree_parents)

    tables, batches, status = _do(state, ids, verb)
    return _with_tables(state, tables), tuple(batches), status


def release(state: KVGroups, rows: Integers) -> tuple[KVGroups, jax.Array]:
    """Frees rows: `pages.release`. What the pages hold stays until it is overwritten."""

    def verb(window, table, ids):
        table, status = pages.release(table, ids)
        return table, None, status

    tables, _, status = _do(state, check_rows("rows", rows), verb)
    return _with_tables(state, tables), status


def fork(
    state: KVGroups, parent: Integers, child: Integers, length: Integers
) -> tuple[KVGroups, jax.Array]:
    """Starts the free row child[i] with the first length[i] tokens of row parent[i].

    `pages.fork`, and the last page is copied where `length` fills it only partly. In a group with a
    window the child shares what is left of the parent's window and slides on by itself. SLID_OUT:
    tokens that the child's next token would see have slid away there; the parent's whole length is
    always possible.
    """
    sources, targets = check_rows("parent", parent), check_rows("child", child)
    check_shape("child", targets, "N", sources.shape)
    lengths = per_row("length", length, sources)

    def verb(window, table, ids):
        if table.windows is None:
            return pages.fork(table, sources, ids, lengths)
        table, copies, status = _fork_stored(table, sources, ids, lengths)
        return _give_windows(window, table), copies, status

    tables, copies, status = _do(state, targets, verb)
    return _copied(state, tables, copies), status


def _fork_stored(
    table: PageTable, parent: jax.Array, child: jax.Array, length: jax.Array
) -> tuple[PageTable, PageCopies, jax.Array]:
    """`pages.fork` where all rows have a window and no pinned tokens; the child slid as its parent.

    What is stored of a row is forked like a row that never slid. The table is right if all is OK.
    """
    windows = table.windows
    assert windows is not None
    takes_part = (parent != -1) & (child != -1)
    source = jnp.clip(parent, 0, table.max_seqs - 1)
    inside = takes_part & (length >= 0) & (length <= table.seq_lens[source])
    lost = inside & loses_window(table, source, length)
    offset = windows.slot_offset[source]

    stored = dataclasses.replace(table, seq_lens=table.seq_lens - windows.slot_offset, windows=None)
    forked, copies, status = pages.fork(stored, parent, child, jnp.where(lost, 0, length - offset))
    status = jnp.where(lost & (status == code(Status.OK)), code(Status.SLID_OUT), status)
    index = jnp.where(takes_part & all_ok(status), child, table.max_seqs)
    slot_offset = windows.slot_offset.at[index].set(offset, mode="drop")
    forked = dataclasses.replace(
        forked,
        seq_lens=forked.seq_lens + slot_offset,
        windows=dataclasses.replace(windows, slot_offset=slot_offset),
    )
    return forked, copies, status


def truncate(state: KVGroups, rows: Integers, num_tokens: Integers) -> tuple[KVGroups, jax.Array]:
    """Drops the last num_tokens[i] tokens of row i and the pages behind the new end.

    `pages.truncate`, and the last page is copied where other rows hold it too. Back to the length
    at the last `reserve` is always possible.
    """

    def verb(window, table, ids):
        return pages.truncate(table, ids, num_tokens)

    tables, copies, status = _do(state, check_rows("rows", rows), verb)
    return _copied(state, tables, copies), status


def commit_tree(state: KVGroups, rows: Integers, leaves: Integers) -> tuple[KVGroups, jax.Array]:
    """Keeps the path to node leaves[i] of row i's tree and drops the other nodes.

    `pages.commit_tree`, and the tokens of the path are moved to where the tree began.
    """

    def verb(window, table, ids):
        return pages.commit_tree(table, ids, leaves)

    tables, moves, status = _do(state, check_rows("rows", rows), verb)
    groups = tuple(map(_moved_in, state.groups, tables, moves))
    return dataclasses.replace(state, groups=groups), status


def reset(state: KVGroups) -> KVGroups:
    """Frees all rows: `pages.reset`. What the pages hold stays until it is overwritten."""
    check_kind("state", state, KVGroups)
    return _with_tables(state, [pages.reset(group.table) for group in state.groups])


def num_free_pages(state: KVGroups) -> jax.Array:
    """i32[groups]: pages that no row holds, of each group."""
    check_kind("state", state, KVGroups)
    return jnp.stack([pages.num_free_pages(group.table) for group in state.groups])


def peak_pages_in_use(state: KVGroups) -> jax.Array:
    """i32[groups]: the most pages held after any verb since the state was made or reset."""
    check_kind("state", state, KVGroups)
    return jnp.stack([pages.peak_pages_in_use(group.table) for group in state.groups])


def _copied(state: KVGroups, tables: Sequence[PageTable], copies: Sequence[PageCopies]) -> KVGroups:
    groups = tuple(map(_copied_in, state.groups, tables, copies))
    return dataclasses.replace(state, groups=groups)


def _copied_in(
    group: KVState | MlaState, table: PageTable, copies: PageCopies
) -> KVState | MlaState:
    if isinstance(group, KVState):
        return _with_copies(group, table, copies)
    (kv_pages,) = copy_rows(2, (group.kv_pages,), *copies)
    return MlaState(kv_pages, table, group.kv_scale)


def _moved_in(group: KVState | MlaState, table: PageTable, moves: SlotMoves) -> KVState | MlaState:
    if isinstance(group, KVState):
        return _with_moves(group, table, moves)
    (kv_pages,) = copy_rows(3, (group.kv_pages,), *moves)
    return MlaState(kv_pages, table, group.kv_scale)
