"""The verbs of the page table: reserve, step_batch, release, fork, truncate, reset, and queries.

`hold`, `unhold` and `adopt` let pages outlive their rows, for a prefix cache. `step_batch` may add
the nodes of token trees, for speculative decoding; `commit_tree` keeps the accepted path.

A verb takes a `PageTable` and returns a new one, together with a status per row. It works eagerly,
under `jax.jit` and inside `lax.while_loop`, and never talks to the host. Rules for all of them:

- A row id of -1 takes no part. Any other id outside [0, max_seqs), or an id given twice, is
  BAD_ROW; so is a negative count.
- All or nothing: if any row fails, the table comes back unchanged. The status of every other row
  says what it would have got. Free pages are handed out in the order of `rows`, and no row that
  needs one overtakes a row that got POOL_FULL. So the call that keeps only the OK rows, with the
  others set to -1, succeeds.
- Pages are freed in the order of `rows`, as if one row came after the other. Free pages are a
  stack: the page freed last is taken first, and a new table hands out page 0, then 1, and so on.
- Integers of any width are taken. What does not fit i32 is clamped, so it never turns into a valid
  id.

Rows share a page only where every holder has it filled to the end: `fork`, `truncate` and `hold`
see to it (`PageCopies`). The slots at and behind a row's length are its own, so no write reaches a
shared page.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged._page_holds import adopt, hold, unhold
from jax_paged._page_table import (
    INT32_MAX,
    Integers,
    PageCopies,
    PageTable,
    SlotMoves,
    Status,
    StepBatch,
    all_ok,
    check_size,
    code,
    first_status,
    hand_out,
    look_up,
    make_table,
    pages_for,
    pop,
    push,
    replace,
)
from jax_paged._page_trees import NO_TREE, commit_tree, read_parents, token_owners
from jax_paged.tree import intervals_of
from jax_paged.validation import as_index, check_shape, expect

__all__ = [
    "NO_TREE",
    "Integers",
    "PageCopies",
    "PageTable",
    "SlotMoves",
    "Status",
    "StepBatch",
    "adopt",
    "commit_tree",
    "fork",
    "free_rows",
    "hold",
    "is_empty",
    "num_free_pages",
    "pages_for",
    "peak_pages_in_use",
    "release",
    "reserve",
    "reset",
    "step_batch",
    "total_tokens",
    "truncate",
    "unhold",
]


def reserve(table: PageTable, rows: Integers, num_tokens: Integers) -> tuple[PageTable, jax.Array]:
    """Makes room for num_tokens[i] more tokens in row i; its length stays as it is.

    Afterwards the row holds at least pages_for(seq_len + num_tokens) pages; those that it held
    before count. A free row becomes live, with length 0. A Python int up to page_size makes the
    call cheaper: for a decode step use reserve(table, rows, 1).

    Args:
      rows: integers [N].
      num_tokens: integers [N] or a scalar, tokens beyond the present length.

    Returns:
      (table, status i32[N]). ROW_FULL: the row would need more than pages_per_seq pages.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    ids = _rows("rows", rows)
    counts = _per_row("num_tokens", num_tokens, ids)
    at_most_one_page = isinstance(num_tokens, int | np.integer) and num_tokens <= table.page_size
    return _reserve(table, ids, counts, 1 if at_most_one_page else table.pages_per_seq)


@functools.partial(jax.jit, static_argnames="max_new")
def _reserve(table, rows, num_tokens, max_new):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    seq_lens, held = table.seq_lens[safe], table.pages_held[safe]
    status = first_status(
        (takes_part & (bad | (num_tokens < 0)), Status.BAD_ROW),
        (takes_part & (num_tokens > table.row_capacity - seq_lens), Status.ROW_FULL),
    )
    fine = takes_part & (status == code(Status.OK))
    target = pages_for(seq_lens + jnp.where(fine, num_tokens, 0), table.page_size)
    need = jnp.where(fine, jnp.maximum(target - held, 0), 0)
    status, need = hand_out(status, need, table.num_free)

    index = jnp.where(takes_part & all_ok(status), rows, table.max_seqs)
    fresh, num_free = pop(table.free_stack, table.num_free, need, max_new)
    row = jnp.where(fresh < table.num_pages, index[:, None], table.max_seqs)
    column = held[:, None] + jnp.arange(max_new, dtype=jnp.int32)[None, :]
    table = replace(
        table,
        page_table=table.page_table.at[row, column].set(fresh, mode="drop"),
        pages_held=table.pages_held.at[index].add(need, mode="drop"),
        is_live=table.is_live.at[index].set(True, mode="drop"),
        ref_counts=table.ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        num_free=num_free,
    )
    return table, status


def step_batch(
    table: PageTable, rows: Integers, q_lens: Integers, *, num_tokens: int | None = None,
    tree_parents: Integers | None = None,
) -> tuple[PageTable, StepBatch, jax.Array]:  # fmt: skip
    """Appends q_lens[i] tokens to row i and tells where they go; once per step, after `reserve`.

    The flat batch holds the tokens of rows[0], then those of rows[1], and so on without gaps, then
    padding. A row of -1 or with q_len 0 has none, so token i is rows[i]'s only if every row before
    it brings exactly one.

    Args:
      rows: integers [S].
      q_lens: integers [S] or a scalar, new tokens per row.
      num_tokens: T, the static size of the flat batch; None = S.
      tree_parents: integers [T]: the tokens are nodes of token trees. A row's nodes are numbered as
        they come, over several steps until `commit_tree`; the parent of a node is an earlier one,
        or -1 for a root. A row whose parents are all NO_TREE (-2) takes plain tokens. A node's
        position is the row's length before the tree plus the number of its ancestors. The batch
        then has `tree` and `tree_sizes`, to be passed to `ragged_paged_attention`.

    Returns:
      (table, batch, status i32[S]). ROW_FULL: the row has not reserved enough pages, or its tree
      would have more than max_tree nodes. UNCOMMITTED_TREE: plain tokens for a row with a tree.
      BAD_ROW also for a row whose tokens do not all fit into the T of the batch, that mixes nodes
      and plain tokens, or that has a wrong parent. If any row fails, the batch is all padding:
      num_seqs 0, slots -1.

    Raises:
      ValueError: a shape or dtype is wrong, or num_tokens is no integer of at least 1.
    """
    ids = _rows("rows", rows)
    size = ids.shape[0] if num_tokens is None else check_size("num_tokens", num_tokens)
    if tree_parents is not None:
        tree_parents = as_index("tree_parents", tree_parents)
        check_shape("tree_parents", tree_parents, "num_tokens", (size,))
    return _step_batch(table, ids, _per_row("q_lens", q_lens, ids), tree_parents, size)


@functools.partial(jax.jit, static_argnames="size")
def _step_batch(table, rows, q_lens, tree_parents, size):
    page_size = table.page_size
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    old_lens, old_nodes = table.seq_lens[safe], table.tree_sizes[safe]
    grows = wrong = overgrown = jnp.zeros((), jnp.bool_)
    if tree_parents is not None:
        grows, wrong = read_parents(table, safe, jnp.where(takes_part, q_lens, 0), tree_parents)
        overgrown = grows & (q_lens > table.max_tree - old_nodes)
    too_long = q_lens > table.pages_held[safe] * page_size - old_lens
    status = first_status(
        (takes_part & (bad | (q_lens < 0)), Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & wrong, Status.BAD_ROW),
        (takes_part & (q_lens > 0) & (old_nodes > 0) & ~grows, Status.UNCOMMITTED_TREE),
        (takes_part & (too_long | overgrown), Status.ROW_FULL),
    )
    # No overflow: these slots are in no other row, so there are num_pages * page_size at most.
    q_lens = jnp.where(takes_part & (status == code(Status.OK)), q_lens, 0)
    past_end = (q_lens > 0) & (jnp.cumsum(q_lens, dtype=jnp.int32) > size)
    status = jnp.where(past_end, code(Status.BAD_ROW), status)

    live = takes_part & all_ok(status)
    q_lens = jnp.where(live, q_lens, 0)
    seq_lens = jnp.where(live, old_lens + q_lens, 0)
    pages = jnp.where(live[:, None], table.page_table[safe], -1)
    ends = jnp.cumsum(q_lens, dtype=jnp.int32)
    owner, number_in_row = token_owners(q_lens, size)
    in_batch = jnp.arange(size, dtype=jnp.int32) < ends[-1]
    places = jnp.where(in_batch, old_lens[owner] + number_in_row, 0)
    slots = pages[owner, places // page_size] * page_size + places % page_size

    index = jnp.where(live, rows, table.max_seqs)
    positions, tree, tree_sizes, grown = places, None, None, {}
    if tree_parents is not None:
        node = old_nodes[owner] + number_in_row
        row = jnp.where(in_batch & grows[owner], index[owner], table.max_seqs)
        tree_sizes = jnp.where(live, old_nodes + jnp.where(grows, q_lens, 0), 0)
        grown = {
            "tree_parents": table.tree_parents.at[row, node].set(tree_parents, mode="drop"),
            "tree_sizes": table.tree_sizes.at[index].set(tree_sizes, mode="drop"),
        }
        tree, depths = intervals_of(grown["tree_parents"][safe], tree_sizes)
        depth = depths[owner, jnp.minimum(node, table.max_tree - 1)]
        in_tree = (old_lens - old_nodes)[owner] + depth
        positions = jnp.where(in_batch & grows[owner], in_tree, places)

    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    batch = StepBatch(
        page_table=pages,
        seq_lens=seq_lens,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        num_seqs=jnp.max(jnp.where(live, number + 1, 0), keepdims=True),
        slot_mapping=jnp.where(in_batch, slots, -1),
        positions=positions,
        tree=tree,
        tree_sizes=tree_sizes,
    )
    new_lens = table.seq_lens.at[index].set(seq_lens, mode="drop")
    return replace(table, seq_lens=new_lens, num_free=table.num_free, **grown), batch, status


def release(table: PageTable, rows: Integers) -> tuple[PageTable, jax.Array]:
    """Frees rows; a page is free again when the last row that holds it has let go.

    Args:
      rows: integers [N].

    Returns:
      (table, status i32[N]). STALE_ROW: the row is free already.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return _release(table, _rows("rows", rows))


@jax.jit
def _release(table, rows):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    status = first_status(
        (bad, Status.BAD_ROW), (takes_part & ~table.is_live[safe], Status.STALE_ROW)
    )
    live = takes_part & all_ok(status)
    index = jnp.where(live, rows, table.max_seqs)
    pages = table.page_table[safe]
    dropped = jnp.where(live[:, None] & (pages >= 0), pages, table.num_pages)
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, dropped
    )
    table = replace(
        table,
        page_table=table.page_table.at[index].set(jnp.int32(-1), mode="drop"),
        seq_lens=table.seq_lens.at[index].set(jnp.int32(0), mode="drop"),
        pages_held=table.pages_held.at[index].set(jnp.int32(0), mode="drop"),
        is_live=table.is_live.at[index].set(False, mode="drop"),
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        tree_sizes=table.tree_sizes.at[index].set(jnp.int32(0), mode="drop"),
    )
    return table, status


def fork(
    table: PageTable, parent: Integers, child: Integers, length: Integers
) -> tuple[PageTable, PageCopies, jax.Array]:
    """Starts the free row child[i] with the first length[i] tokens of row parent[i].

    Full pages are shared. For a last page that `length` fills only partly the child gets a fresh
    page, into which the caller copies the old one before the next write (`state.fork` does). A
    parent may have several children in one call. A pair with a -1 takes no part.

    Args:
      parent, child: integers [N].
      length: integers [N] or a scalar, from 0 to the parent's length.

    Returns:
      (table, copies, status i32[N]). STALE_ROW: the parent is not live. UNCOMMITTED_TREE: it has a
      tree. BAD_ROW also for a child that is live, given twice, or a parent in the same call, and
      for a length out of range.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    sources, targets = _rows("parent", parent), _rows("child", child)
    check_shape("child", targets, "N", sources.shape)
    return _fork(table, sources, targets, _per_row("length", length, sources))


@jax.jit
def _fork(table, parent, child, length):
    max_seqs, num_pages, page_size = table.max_seqs, table.num_pages, table.page_size
    takes_part = (parent != -1) & (child != -1)
    parent, child = jnp.where(takes_part, parent, -1), jnp.where(takes_part, child, -1)
    inside = (parent >= 0) & (parent < max_seqs)
    source = jnp.where(inside, parent, 0)
    _, bad, target = look_up(child, max_seqs)
    nowhere = jnp.zeros(max_seqs, jnp.bool_)
    is_parent = nowhere.at[jnp.where(inside, parent, max_seqs)].set(True, mode="drop")
    is_child = nowhere.at[jnp.where(child >= 0, child, max_seqs)].set(True, mode="drop")
    bad |= ~inside | is_parent[target] | is_child[source] | table.is_live[target] | (length < 0)
    status = first_status(
        (takes_part & bad, Status.BAD_ROW),
        (takes_part & ~table.is_live[source], Status.STALE_ROW),
        (takes_part & (table.tree_sizes[source] > 0), Status.UNCOMMITTED_TREE),
        (takes_part & (length > table.seq_lens[source]), Status.BAD_ROW),
    )
    partial = takes_part & (length % page_size != 0)
    status, need = hand_out(status, partial.astype(jnp.int32), table.num_free)

    live = takes_part & all_ok(status)
    full = jnp.where(live, length // page_size, 0)
    fresh, num_free = pop(table.free_stack, table.num_free, need, 1)
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None, :]
    old_pages = table.page_table[source]
    shared = column < full[:, None]
    copied = (column == full[:, None]) & (need > 0)[:, None]
    pages = jnp.where(shared, old_pages, jnp.where(copied, fresh, -1))
    counted = jnp.where(shared, old_pages, num_pages)
    ref_counts = table.ref_counts.at[counted].add(jnp.int32(1), mode="drop")
    index = jnp.where(live, child, max_seqs)
    table = replace(
        table,
        page_table=table.page_table.at[index].set(pages, mode="drop"),
        seq_lens=table.seq_lens.at[index].set(length, mode="drop"),
        pages_held=table.pages_held.at[index].set(full + need, mode="drop"),
        is_live=table.is_live.at[index].set(True, mode="drop"),
        ref_counts=ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        num_free=num_free,
    )
    src = jnp.max(jnp.where(copied, old_pages, -1), axis=1)
    return table, PageCopies(src, jnp.where(need > 0, fresh[:, 0], -1)), status


def truncate(
    table: PageTable, rows: Integers, num_tokens: Integers
) -> tuple[PageTable, PageCopies, jax.Array]:
    """Drops the last num_tokens[i] tokens of row i, and its pages wholly behind the new end.

    Reserved pages without a token go too: num_tokens = 0 trims a row to its length. A row cut to
    length 0 stays live.

    A new end inside a page that other rows hold would make the next write overwrite their tokens.
    The row then gets a fresh page, into which the caller copies the old one before the next write
    (`state.truncate` does). It needs a free page for that, or POOL_FULL, unless the cut frees a
    page that it alone holds. If all holders of a page are cut inside it in one call, the last of
    them keeps it.

    Args:
      rows: integers [N].
      num_tokens: integers [N] or a scalar, tokens to drop, from 0 to the row's length.

    Returns:
      (table, copies, status i32[N]). STALE_ROW: the row is not live. UNCOMMITTED_TREE: it has a
      tree. BAD_ROW also for num_tokens out of range.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    ids = _rows("rows", rows)
    return _truncate(table, ids, _per_row("num_tokens", num_tokens, ids))


@jax.jit
def _truncate(table, rows, num_tokens):
    max_seqs, num_pages, page_size = table.max_seqs, table.num_pages, table.page_size
    takes_part, bad, safe = look_up(rows, max_seqs)
    old_lens = table.seq_lens[safe]
    status = first_status(
        (takes_part & (bad | (num_tokens < 0)), Status.BAD_ROW),
        (takes_part & ~table.is_live[safe], Status.STALE_ROW),
        (takes_part & (table.tree_sizes[safe] > 0), Status.UNCOMMITTED_TREE),
        (takes_part & (num_tokens > old_lens), Status.BAD_ROW),
    )
    fine = takes_part & (status == code(Status.OK))
    length = jnp.where(fine, old_lens - num_tokens, 0)
    keep = pages_for(length, page_size)
    pages = table.page_table[safe]
    holders = table.ref_counts[jnp.maximum(pages, 0)]
    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)[None, :]
    behind = fine[:, None] & (column >= keep[:, None]) & (pages >= 0)
    is_cut = (length % page_size != 0)[:, None] & (column == keep[:, None] - 1)  # <= 1 page a row
    shared = jnp.any(is_cut & (holders > 1), axis=1)
    # A row's need depends on that row alone, so that fewer rows in a retry never need more.
    frees_own = jnp.any(behind & (holders == 1), axis=1)
    status, _ = hand_out(status, (shared & ~frees_own).astype(jnp.int32), table.num_free)

    live = takes_part & all_ok(status)
    index = jnp.where(live, rows, max_seqs)
    behind, is_cut = behind & live[:, None], is_cut & live[:, None]
    dropped = jnp.where(behind, pages, num_pages)
    # The last of the rows cut inside a page keeps it when nobody else is left. So a source of a
    # copy is never freed here, and cannot be the target of another copy.
    cut_page = jnp.max(jnp.where(is_cut, pages, -1), axis=1)
    cut_index = jnp.where(cut_page >= 0, cut_page, num_pages)
    number = jnp.arange(rows.shape[0], dtype=jnp.int32)
    last_cut = jnp.full(num_pages, -1, jnp.int32).at[cut_index].max(number, mode="drop")
    others = table.ref_counts.at[dropped].add(jnp.int32(-1), mode="drop")
    others = others.at[cut_index].add(jnp.int32(-1), mode="drop")
    keeps = (others[cut_page] == 0) & (last_cut[cut_page] == number)
    copy = shared & live & ~keeps

    copied = is_cut & copy[:, None]
    ref_counts, free_stack, num_free = push(
        table.ref_counts, table.free_stack, table.num_free, jnp.where(copied, pages, dropped)
    )
    fresh, num_free = pop(free_stack, num_free, copy.astype(jnp.int32), 1)
    kept = jnp.where(copied, fresh, jnp.where(column < keep[:, None], pages, -1))
    table = replace(
        table,
        page_table=table.page_table.at[index].set(kept, mode="drop"),
        seq_lens=table.seq_lens.at[index].set(length, mode="drop"),
        pages_held=table.pages_held.at[index].set(keep, mode="drop"),
        ref_counts=ref_counts.at[fresh].set(jnp.int32(1), mode="drop"),
        free_stack=free_stack,
        num_free=num_free,
    )
    none = jnp.int32(-1)
    copies = PageCopies(jnp.where(copy, cut_page, none), jnp.where(copy, fresh[:, 0], none))
    return table, copies, status


def reset(table: PageTable) -> PageTable:
    """The table as `PageTable.create` made it: all rows and pages free, the peak 0."""
    sizes = (table.num_pages, table.max_seqs, table.pages_per_seq, table.page_size)
    return make_table(*sizes, table.max_tree)


def free_rows(table: PageTable) -> jax.Array:
    """bool[max_seqs]: the rows that are not live."""
    return ~table.is_live


def num_free_pages(table: PageTable) -> jax.Array:
    """i32[]: pages that no row holds and that are not on hold."""
    return table.num_free


def peak_pages_in_use(table: PageTable) -> jax.Array:
    """i32[]: the most pages held after any verb since the table was made or reset."""
    return table.peak_pages


def total_tokens(table: PageTable) -> jax.Array:
    """i32[]: the sum of all lengths, a shared token counted in each row; at most 2**31 - 1."""
    exact = jnp.sum(table.seq_lens.astype(jnp.uint32), dtype=jnp.uint32)  # modulo 2**32
    estimate = jnp.sum(table.seq_lens.astype(jnp.float32))
    most = jnp.uint32(INT32_MAX)
    clamped = jnp.where(estimate < jnp.float32(3e9), jnp.minimum(exact, most), most)
    return clamped.astype(jnp.int32)


def is_empty(table: PageTable) -> jax.Array:
    """bool[]: no row is live."""
    return ~jnp.any(table.is_live)


def _rows(name: str, value: Integers) -> jax.Array:
    rows = as_index(name, value)
    ok = rows.ndim == 1 and rows.shape[0] > 0
    expect(ok, name, "shape [N] with N of at least 1", list(rows.shape))
    return rows


def _per_row(name: str, value: Integers, rows: jax.Array) -> jax.Array:
    counts = as_index(name, value)
    ok = counts.shape in ((), rows.shape)
    expect(ok, name, f"a scalar or shape {list(rows.shape)}", list(counts.shape))
    return jnp.broadcast_to(counts, rows.shape)
