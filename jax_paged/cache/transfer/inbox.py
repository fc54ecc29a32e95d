# SPDX-License-Identifier: Apache-2.0
"""Tokens read from one cache and written into another, on the device: exported by `transfer`.

The receiver keeps, row by row and layer by layer, how far tokens have come without a gap. That is
all it takes to make messages harmless: what has come before is not written again, what leaves a gap
or belongs to another transfer is refused, and a row's length only follows its slowest layer.

Of a state with several groups each message is of one of them, and the lengths of all tables change
together. Where the whole row comes at once, a group with a window gets no more of it than the next
token sees. The row then gets its length, and the group's table its offset, when all of it is there.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.pools import KVGroup
from jax_paged.cache.state import KVState
from jax_paged.cache.table import (
    STALE,
    Integers,
    all_ok,
    first_status,
    if_ok,
    look_up,
    replace,
)
from jax_paged.cache.windows import never_seen
from jax_paged.checks import (
    as_index,
    check_shape,
    check_size,
    expect,
    is_eight_bit,
    is_per_token,
    kind_text,
)
from jax_paged.checks.status import Status, code
from jax_paged.layout import pages_shape, pool_of_v
from jax_paged.ops import reference
from jax_paged.ops.mla import write_mla_kv
from jax_paged.ops.ranges import gather_kv, slots_of_ranges
from jax_paged.ops.write import write_kv


class Payload(NamedTuple):
    """Token ranges of a group as its pages store them; the scales are None unless per token."""

    # [num_layers, n, max_tokens, num_kv_heads, head_dim] in the pages' dtype; latent rows
    # [num_layers, n, max_tokens, latent + rope]
    k: Any
    v: Any  # None: latent rows
    k_scale: Any = None  # f32[num_layers, n, max_tokens, num_kv_heads]
    v_scale: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the rows of a state are to receive, and how far it has come."""

    ids: jax.Array  # i32[max_seqs], of the row's transfer, -1 = none
    begins: jax.Array  # i32[max_seqs], the tokens that it brings
    ends: jax.Array  # i32[max_seqs]
    left_out: jax.Array  # i32[max_seqs, groups], the first of them, which the group does not get
    # Of each group i32[max_seqs, num_layers], where what has come without a gap ends.
    received: tuple[jax.Array, ...]
    next_id: jax.Array  # i32[], no id is given twice

    @staticmethod
    def create(state: KVState) -> "Inbox":
        """One that expects nothing, for the rows and layers of `state`.

        Raises:
          ValueError: it is none.
        """
        check_state(state)
        rows = state.max_seqs
        return Inbox(
            ids=jnp.full(rows, -1, jnp.int32),
            begins=jnp.zeros(rows, jnp.int32),
            ends=jnp.zeros(rows, jnp.int32),
            left_out=jnp.zeros((rows, len(state.groups)), jnp.int32),
            received=tuple(
                jnp.zeros((rows, group.num_layers), jnp.int32) for group in state.groups
            ),
            next_id=jnp.zeros((), jnp.int32),
        )


def prepare(
    state: KVState, inbox: Inbox, rows: Integers, num_tokens: Integers
) -> tuple[KVState, Inbox, jax.Array, jax.Array, jax.Array]:
    """Makes room for num_tokens[i] tokens that row i is to receive behind those that it has.

    A group with a window gets room for those alone which the token behind them sees, if the row has
    no token yet. So a text of any length goes into the pages of a window; but if some is left out,
    the row keeps its length of 0 until all has come.

    Args:
      rows: integers [N]; a free row becomes live, as by `reserve`.
      num_tokens: integers [N], at least 1.

    Returns:
      (state, inbox, ids i32[N], slots i32[N, groups, …], status i32[N]). ids: of the transfers, -1
      where nothing was prepared. slots: where in each group the tokens go that it gets, up to the
      last one, then -1. Statuses of `reserve`; BAD_ROW also for a count below 1 and for a row that
      still waits for tokens; UNCOMMITTED_TREE. If any row fails, nothing has changed.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_state(state)
    rows, num_tokens = as_index("rows", rows), as_index("num_tokens", num_tokens)
    check_shape("rows", rows, "N", (None,))
    check_shape("num_tokens", num_tokens, "N", rows.shape)
    tables, inbox, *rest = _prepare(_tables(state), inbox, rows, num_tokens)
    return _with_tables(state, tables), inbox, *rest


@jax.jit
def _prepare(tables, inbox, rows, num_tokens):
    table = tables[0]  # for what is the same in all
    takes_part, _, safe = look_up(rows, table.max_seqs)
    begins = table.seq_lens[safe]
    waits = (inbox.ids[safe] >= 0) & (_least(inbox.received, safe) < inbox.ends[safe])
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (num_tokens < 1), Status.BAD_ROW),
        (takes_part & table.is_live[safe] & waits, Status.BAD_ROW),
        (takes_part & (table.tree_sizes[safe] > 0), Status.UNCOMMITTED_TREE),
    )
    left_out = [never_seen(table, safe, num_tokens) for table in tables]
    reserved = [
        table.reserve(rows, num_tokens - count)
        for table, count in zip(tables, left_out, strict=True)
    ]
    for _, of_reserve in reserved:
        status = jnp.where(status == code(Status.OK), of_reserve, status)
    ok = all_ok(status)
    tables = tuple(if_ok(ok, new, old) for (new, _), old in zip(reserved, tables, strict=True))
    live = takes_part & ok
    index = jnp.where(live, rows, table.max_seqs)
    ends = begins + jnp.where(live, num_tokens, 0)
    ids = inbox.next_id + jnp.cumsum(live, dtype=jnp.int32) - 1
    begins_of = [begins + count for count in left_out]
    inbox = Inbox(
        ids=inbox.ids.at[index].set(ids, mode="drop"),
        begins=inbox.begins.at[index].set(begins, mode="drop"),
        ends=inbox.ends.at[index].set(ends, mode="drop"),
        left_out=inbox.left_out.at[index].set(jnp.stack(left_out, axis=1), mode="drop"),
        received=tuple(
            received.at[index].set(begin[:, None], mode="drop")
            for received, begin in zip(inbox.received, begins_of, strict=True)
        ),
        next_id=inbox.next_id + jnp.sum(live, dtype=jnp.int32),
    )
    width = max(table.pages_per_seq * table.page_size for table in tables)
    prepared = jnp.where(live, rows, -1)
    slots = [
        _slots(table, width, prepared, begin, ends, count)
        for table, begin, count in zip(tables, begins_of, left_out, strict=True)
    ]
    return tables, inbox, jnp.where(live, ids, -1), jnp.stack(slots, axis=1), status


def forget(inbox: Inbox, rows: Integers) -> Inbox:
    """Ends the transfers to these rows, done or not: later messages are STALE_ROW.

    Args:
      rows: integers [N]. Call it before `release`, or before a row goes to somebody else.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    rows = as_index("rows", rows)
    check_shape("rows", rows, "N", (None,))
    return _forget(inbox, rows)


@jax.jit
def _forget(inbox, rows):
    size = inbox.ids.shape[0]
    index = jnp.where((rows >= 0) & (rows < size), rows, size)
    return dataclasses.replace(inbox, ids=inbox.ids.at[index].set(jnp.int32(-1), mode="drop"))


def read(
    state: KVState,
    rows: Integers,
    begins: Integers,
    ends: Integers,
    *,
    max_tokens: int,
    group: int = 0,
    layer_begin: Any = 0,
    num_layers: int | None = None,
) -> Payload:
    """Tokens begins[i] ≤ t < ends[i] of row rows[i], as they are stored, of some layers of a group.

    Args:
      rows, begins, ends: integers [N], as for `gather_kv`. What lies beyond a row's length is 0,
        so a range that begins there sends nothing old. So is what has slid out of its window.
      max_tokens: the longest range. Static.
      group: its number in the state. Static.
      layer_begin: the first layer of the group, may be traced. num_layers: how many; None = all.
        Static.

    Raises:
      ValueError: a shape, dtype or size is wrong, or there is no such group.
    """
    check_state(state)
    rows = as_index("rows", rows)
    check_shape("rows", rows, "N", (None,))
    begins, ends = as_index("begins", begins), as_index("ends", ends)
    max_tokens = check_size("max_tokens", max_tokens)
    of_group = _group(state, group)
    all_layers = of_group.num_layers
    count = all_layers if num_layers is None else check_size("num_layers", num_layers)
    layer_begin = as_index("layer_begin", layer_begin)
    return _read(of_group, rows, begins, ends, layer_begin, max_tokens, count)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _read(group, rows, begins, ends, layer_begin, max_tokens, num_layers):
    table = group.table
    inside = (rows >= 0) & (rows < table.max_seqs)
    ends = jnp.minimum(ends, jnp.where(inside, table.seq_lens[jnp.where(inside, rows, 0)], 0))
    ranges = (table.page_table, rows, begins, ends)
    slid = dict(zip(("num_pinned", "slot_offset"), _slid(table), strict=True))
    # 8-bit values are exact in bf16; without a scale they come as they are.
    dtype = jnp.bfloat16 if is_eight_bit(group.k_pages) else group.k_pages.dtype

    def one_layer(layer):
        stored = gather_kv(
            group.k_pages, group.v_pages, *ranges, max_tokens=max_tokens, layer=layer, dtype=dtype,
            layout=group.layout, **slid,
        )  # fmt: skip
        k, v = jax.tree.map(lambda x: x.astype(group.k_pages.dtype), stored)
        if not is_per_token(group.k_scale):
            return Payload(k, v)
        k_scale, v_scale = gather_kv(  # like pages with a head_dim of 1
            group.k_scale[..., None], group.v_scale[..., None], *ranges, max_tokens=max_tokens,
            layer=layer, **slid,
        )  # fmt: skip
        return Payload(k, v, k_scale[..., 0], v_scale[..., 0])

    return jax.lax.map(one_layer, layer_begin + jnp.arange(num_layers, dtype=jnp.int32))


def receive(
    state: KVState,
    inbox: Inbox,
    rows: Integers,
    ids: Integers,
    begins: Integers,
    ends: Integers,
    slots: Integers,
    payload: Payload,
    *,
    group: int = 0,
    layer_begin: Any = 0,
) -> tuple[KVState, Inbox, jax.Array]:
    """Writes what has come for row rows[i]: tokens begins[i] ≤ t < ends[i] of a group's layers.

    A row's length grows to where all its layers have come without a gap, and tokens that have come
    before are left as they are, so a message may come twice. The pages are donated and updated in
    place; called eagerly, use those of the returned state.

    Args:
      rows: integers [N], each row once; -1 takes no part. ids: of the rows' transfers.
      begins, ends: integers [N].
      slots: integers [N, max_tokens], where the tokens go: those that `prepare` gave for them.
      payload: as `read` gives it, of the group's layers from layer_begin (may be traced) on.
      group: its number in the state. Static.

    Returns:
      (state, inbox, status i32[N]). GAP: tokens before these have not come; send from there again.
      STALE_ROW: the row is free, its transfer has another id, or its length is not what the
      transfer has made it. BAD_ROW also for tokens, layers or slots that are not the transfer's. If
      any row fails, nothing has changed.

    Raises:
      ValueError: a shape or dtype is wrong, or there is no such group.
    """
    check_state(state)
    of_group = _group(state, group)
    given = {"rows": rows, "ids": ids, "begins": begins, "ends": ends}
    indices = [as_index(name, value) for name, value in given.items()]
    for name, x in zip(given, indices, strict=True):
        check_shape(name, x, "N", (None,) if name == "rows" else indices[0].shape)
    slots = as_index("slots", slots)
    check_shape("slots", slots, "N max_tokens", (*indices[0].shape, None))
    _check_payload(of_group, payload, slots.shape)
    layer_begin = as_index("layer_begin", layer_begin)
    pools = (of_group.k_pages, of_group.v_pages, of_group.k_scale, of_group.v_scale)
    pools, tables, inbox, status = _write(
        of_group.layout, group, pools, _tables(state), inbox, *indices, slots, payload, layer_begin
    )
    return _with_tables(state.with_pages(group, *pools), tables), inbox, status


def check_state(state: KVState) -> None:
    """A ValueError for what is no state."""
    expect(isinstance(state, KVState), "state", "a KVState", kind_text(state))


def _group(state: KVState, number: int) -> KVGroup:
    count = len(state.groups)
    ok = isinstance(number, int) and 0 <= number < count
    expect(ok, "group", f"one of {count} groups of layers", repr(number))
    return state.groups[number]


def _tables(state: KVState) -> tuple[PageTable, ...]:
    return tuple(group.table for group in state.groups)


def _with_tables(state: KVState, tables: tuple[PageTable, ...]) -> KVState:
    groups = zip(state.groups, tables, strict=True)
    changed = tuple(dataclasses.replace(group, table=table) for group, table in groups)
    return dataclasses.replace(state, groups=changed)


def _slid(table: PageTable) -> tuple[Any, Any]:
    """num_pinned and slot_offset of all rows, or twice None."""
    windows = table.windows
    return (None, None) if windows is None else (windows.num_pinned, windows.slot_offset)


def _slots(table: PageTable, width: int, rows, begins, ends, left_out) -> jax.Array:
    """The slots of token ranges of rows; left_out[i]: tokens that the table will count as slid."""
    num_pinned, slot_offset = _slid(table)
    if slot_offset is not None:
        index = jnp.where(rows >= 0, rows, table.max_seqs)
        offset = slot_offset[jnp.maximum(rows, 0)] + left_out
        slot_offset = slot_offset.at[index].set(offset, mode="drop")
    return slots_of_ranges(
        table.num_pages, table.page_size, width, table.page_table, rows, begins, ends, num_pinned,
        slot_offset,
    )  # fmt: skip


def _least(received: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    """i32[N]: where the slowest layer of rows (safe ids) has got."""
    slowest = [jnp.min(layers[rows], axis=1) for layers in received]
    return jnp.min(jnp.stack(slowest), axis=0)


def _length(inbox: Inbox, rows: jax.Array) -> jax.Array:
    """i32[N]: the length that their transfers have made rows (safe ids)."""
    least, begins = _least(inbox.received, rows), inbox.begins[rows]
    in_one_go = jnp.any(inbox.left_out[rows] > 0, axis=1)
    return jnp.where(in_one_go & (least < inbox.ends[rows]), begins, least)


def _check_payload(group: KVGroup, payload: Payload, sizes_of_slots: tuple[int, ...]) -> None:
    num_layers, most = payload.k.shape[0] if payload.k.ndim else None, group.num_layers
    expect(
        num_layers is None or num_layers <= most, "payload.k", f"at most {most} layers", num_layers
    )
    wanted = _of_token(group)
    for name, x in payload._asdict().items():
        label = f"payload.{name}"
        if name not in wanted:
            expect(x is None, label, "None", "an array")
            continue
        expect(x is not None, label, "an array", "None")
        axes, sizes, dtype = wanted[name]
        given = (num_layers, *sizes_of_slots, *sizes)
        check_shape(label, x, f"num_layers N max_tokens {axes}", given)
        expect(x.dtype == dtype, label, f"dtype {dtype.name}", x.dtype.name)


def _of_token(group: KVGroup) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """What a token has in a group: field of `Payload` → (axes, sizes, dtype)."""
    if group.is_latent:
        return {"k": ("latent+rope", group.k_pages.shape[-1:], group.k_pages.dtype)}
    k = pages_shape(group.k_pages, group.layout)
    v_pages = pool_of_v(group.k_pages, group.v_pages, group.layout)
    heads, axes = (k.num_kv_heads,), "num_kv_heads head_dim"
    wanted = {
        "k": (axes, (*heads, k.head_dim), group.k_pages.dtype),
        "v": (axes, (*heads, pages_shape(v_pages, group.layout, "v").head_dim), v_pages.dtype),
    }
    if is_per_token(group.k_scale):
        of_scale = ("num_kv_heads", heads, jnp.dtype(jnp.float32))
        wanted |= {"k_scale": of_scale, "v_scale": of_scale}
    return wanted


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _write(
    layout, number, pools, tables, inbox, rows, ids, begins, ends, slots, payload: Payload,
    layer_begin,
):  # fmt: skip
    table = tables[number]
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    count, width = payload.k.shape[0], slots.shape[1]
    received, seq_lens = inbox.received[number][safe], table.seq_lens[safe]  # [N, num_layers], [N]
    left_out, last = inbox.left_out[safe, number], inbox.ends[safe]
    waits = _least(inbox.received, safe) < last
    layers = jnp.arange(received.shape[1], dtype=jnp.int32)
    among = (layers >= layer_begin) & (layers - count < layer_begin)
    bad |= (begins < inbox.begins[safe] + left_out) | (ends > last) | (begins > ends)
    bad |= (ends - begins > width) | (layer_begin < 0) | (layer_begin > layers.size - count)
    is_new = jnp.any(among[None] & (received < ends[:, None]), axis=1)
    gap = jnp.any(among[None] & (received < begins[:, None]), axis=1)
    own = _slots(table, width, safe, begins, ends, jnp.where(waits, left_out, 0))
    token = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    elsewhere = jnp.any((token < ends[:, None]) & (slots != own), axis=1)
    is_own = table.is_live[safe] & (inbox.ids[safe] == ids) & (ids >= 0)
    is_own &= ~is_new | (seq_lens == _length(inbox, safe))
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & ((rows < 0) | (rows >= table.max_seqs)), Status.BAD_ROW),
        (takes_part & ~is_own, Status.STALE_ROW),
        (takes_part & (bad | elsewhere), Status.BAD_ROW),
        (takes_part & gap, Status.GAP),
    )
    live = takes_part & all_ok(status)

    def write_layer(number, pools):
        layer = layer_begin + number
        fresh = live[:, None] & (token >= received[:, layer][:, None]) & (token < ends[:, None])
        at = jnp.where(fresh, own, -1).reshape(-1)
        return _write_layer(layout, pools, at, Payload(*(_at(x, number) for x in payload)), layer)

    pools = jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), write_layer, pools)
    index = jnp.where(live, rows, table.max_seqs)
    reached = jnp.where(among[None], jnp.maximum(received, ends[:, None]), received)
    reached = inbox.received[number].at[index].set(reached, mode="drop")
    received_by_all = (*inbox.received[:number], reached, *inbox.received[number + 1 :])
    inbox = dataclasses.replace(inbox, received=received_by_all)
    grown = jnp.where(is_new, _length(inbox, safe), seq_lens)
    is_whole = waits & (_least(inbox.received, safe) >= last)
    slid = jnp.where(is_whole[:, None], inbox.left_out[safe], 0)  # [N, groups]
    tables = tuple(
        _grown(table, index, grown, slid[:, place]) for place, table in enumerate(tables)
    )
    return pools, tables, inbox, status


def _grown(table: PageTable, index, seq_lens, slid) -> PageTable:
    """With other lengths, and as many tokens more that slid; `index` as for `slide`."""
    windows = table.windows
    if windows is not None:
        offset = windows.slot_offset.at[index].add(slid, mode="drop")
        windows = dataclasses.replace(windows, slot_offset=offset)
    seq_lens = table.seq_lens.at[index].set(seq_lens, mode="drop")
    return replace(table, seq_lens=seq_lens, num_free=table.num_free, windows=windows)


def _at(x, number):
    """Tokens of one layer of a payload, flat."""
    return None if x is None else x[number].reshape(-1, *x.shape[3:])


def _write_layer(layout, pools, slots, tokens: Payload, layer):
    k_pages, v_pages, k_scale, v_scale = pools
    k, v = tokens.k, tokens.v
    if is_eight_bit(k_pages):  # exact, and written as they are: without a scale
        k, v = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (k, v))
    if v is None:
        return write_mla_kv(k_pages, k, slots, layer=layer), None, k_scale, None
    k_pages, v_pages, *_ = write_kv(k_pages, v_pages, k, v, slots, layer=layer, layout=layout)
    if is_per_token(k_scale):
        k_scale, v_scale = reference.write_scales(
            k_scale, v_scale, tokens.k_scale, tokens.v_scale, slots, layer
        )
    return k_pages, v_pages, k_scale, v_scale
