# SPDX-License-Identifier: Apache-2.0
"""Tokens read from one cache and written into another, on the device: exported by `transfer`.

The receiver keeps, row by row and layer by layer, how far tokens have come without a gap. That is
all it takes to make messages harmless: what has come before is not written again, what leaves a gap
or belongs to another transfer is refused, and a row's length only follows its slowest layer.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_paged.cache.page_table import PageTable
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
from jax_paged.ops.ranges import gather_kv, slots_of_ranges
from jax_paged.ops.write import write_kv


class Payload(NamedTuple):
    """K and V of token ranges as the pages store them; the scales are None unless per token."""

    k: Any  # [num_layers, n, max_tokens, num_kv_heads, head_dim] in the pages' dtype
    v: Any
    k_scale: Any = None  # f32[num_layers, n, max_tokens, num_kv_heads]
    v_scale: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the rows of a state are to receive, and how far it has come."""

    ids: jax.Array  # i32[max_seqs], of the row's transfer, -1 = none
    begins: jax.Array  # i32[max_seqs], the tokens that it brings
    ends: jax.Array  # i32[max_seqs]
    received: jax.Array  # i32[max_seqs, num_layers], where what has come without a gap ends
    next_id: jax.Array  # i32[], no id is given twice

    @staticmethod
    def create(state: KVState) -> "Inbox":
        """One that expects nothing, for the rows and layers of `state`.

        Raises:
          ValueError: the state has latent rows or several groups.
        """
        check_state(state)
        rows, layers = state.table.max_seqs, state.k_pages.shape[0]
        return Inbox(
            ids=jnp.full(rows, -1, jnp.int32),
            begins=jnp.zeros(rows, jnp.int32),
            ends=jnp.zeros(rows, jnp.int32),
            received=jnp.zeros((rows, layers), jnp.int32),
            next_id=jnp.zeros((), jnp.int32),
        )


def prepare(
    state: KVState, inbox: Inbox, rows: Integers, num_tokens: Integers
) -> tuple[KVState, Inbox, jax.Array, jax.Array, jax.Array]:
    """Makes room for num_tokens[i] tokens that row i is to receive behind those that it has.

    Args:
      rows: integers [N]; a free row becomes live, as by `reserve`.
      num_tokens: integers [N], at least 1.

    Returns:
      (state, inbox, ids i32[N], slots i32[N, pages_per_seq · page_size], status i32[N]). ids: of
      the transfers, -1 where nothing was prepared. slots: where the tokens go, then -1. Statuses of
      `reserve`; BAD_ROW also for a count below 1 and for a row that still waits for tokens;
      UNCOMMITTED_TREE. If any row fails, nothing has changed.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_state(state)
    rows, num_tokens = as_index("rows", rows), as_index("num_tokens", num_tokens)
    check_shape("rows", rows, "N", (None,))
    check_shape("num_tokens", num_tokens, "N", rows.shape)
    table, inbox, *rest = _prepare(state.table, inbox, rows, num_tokens)
    return state.replace(table=table), inbox, *rest


@jax.jit
def _prepare(table, inbox, rows, num_tokens):
    takes_part, _, safe = look_up(rows, table.max_seqs)
    begins = table.seq_lens[safe]
    waits = (inbox.ids[safe] >= 0) & (jnp.min(inbox.received[safe], axis=1) < inbox.ends[safe])
    reserved, of_reserve = table.reserve(rows, num_tokens)
    status = first_status(
        (rows == STALE, Status.STALE_ROW),
        (takes_part & (num_tokens < 1), Status.BAD_ROW),
        (takes_part & table.is_live[safe] & waits, Status.BAD_ROW),
        (takes_part & (table.tree_sizes[safe] > 0), Status.UNCOMMITTED_TREE),
    )
    status = jnp.where(status == code(Status.OK), of_reserve, status)
    ok = all_ok(status)
    table = if_ok(ok, reserved, table)
    live = takes_part & ok
    index = jnp.where(live, rows, table.max_seqs)
    ends = begins + jnp.where(live, num_tokens, 0)
    ids = inbox.next_id + jnp.cumsum(live, dtype=jnp.int32) - 1
    inbox = Inbox(
        ids=inbox.ids.at[index].set(ids, mode="drop"),
        begins=inbox.begins.at[index].set(begins, mode="drop"),
        ends=inbox.ends.at[index].set(ends, mode="drop"),
        received=inbox.received.at[index].set(begins[:, None], mode="drop"),
        next_id=inbox.next_id + jnp.sum(live, dtype=jnp.int32),
    )
    slots = slots_of_ranges(
        table.num_pages, table.page_size, table.pages_per_seq * table.page_size,
        table.page_table, jnp.where(live, rows, -1), begins, ends, *_slid(table),
    )  # fmt: skip
    return table, inbox, jnp.where(live, ids, -1), slots, status


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
    layer_begin: Any = 0,
    num_layers: int | None = None,
) -> Payload:
    """Tokens begins[i] ≤ t < ends[i] of row rows[i], as they are stored, of some layers.

    Args:
      rows, begins, ends: integers [N], as for `gather_kv`. What lies beyond a row's length is 0,
        so a range that begins there sends nothing old. So is what has slid out of its window.
      max_tokens: the longest range. Static.
      layer_begin: the first layer, may be traced. num_layers: how many; None = all. Static.

    Raises:
      ValueError: a shape, dtype or size is wrong, or the state has latent rows or several groups.
    """
    check_state(state)
    rows = as_index("rows", rows)
    check_shape("rows", rows, "N", (None,))
    begins, ends = as_index("begins", begins), as_index("ends", ends)
    max_tokens = check_size("max_tokens", max_tokens)
    all_layers = state.k_pages.shape[0]
    count = all_layers if num_layers is None else check_size("num_layers", num_layers)
    return _read(state, rows, begins, ends, as_index("layer_begin", layer_begin), max_tokens, count)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _read(state, rows, begins, ends, layer_begin, max_tokens, num_layers):
    table = state.table
    inside = (rows >= 0) & (rows < table.max_seqs)
    ends = jnp.minimum(ends, jnp.where(inside, table.seq_lens[jnp.where(inside, rows, 0)], 0))
    ranges = (table.page_table, rows, begins, ends)
    slid = dict(zip(("num_pinned", "slot_offset"), _slid(table), strict=True))
    # 8-bit values are exact in bf16; without a scale they come as they are.
    dtype = jnp.bfloat16 if is_eight_bit(state.k_pages) else state.k_pages.dtype

    def one_layer(layer):
        k, v = gather_kv(
            state.k_pages, state.v_pages, *ranges, max_tokens=max_tokens, layer=layer, dtype=dtype,
            layout=state.layout, **slid,
        )  # fmt: skip
        tokens = Payload(k.astype(state.k_pages.dtype), v.astype(state.k_pages.dtype))
        if not is_per_token(state.k_scale):
            return tokens
        assert state.k_scale is not None
        assert state.v_scale is not None
        k_scale, v_scale = gather_kv(  # like pages with a head_dim of 1
            state.k_scale[..., None], state.v_scale[..., None], *ranges, max_tokens=max_tokens,
            layer=layer, **slid,
        )  # fmt: skip
        return tokens._replace(k_scale=k_scale[..., 0], v_scale=v_scale[..., 0])

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
    layer_begin: Any = 0,
) -> tuple[KVState, Inbox, jax.Array]:
    """Writes what has come for row rows[i]: tokens begins[i] ≤ t < ends[i] of some layers.

    A row's length grows to where all its layers have come without a gap, and tokens that have come
    before are left as they are, so a message may come twice. The pages are donated and updated in
    place; called eagerly, use those of the returned state.

    Args:
      rows: integers [N], each row once; -1 takes no part. ids: of the rows' transfers.
      begins, ends: integers [N].
      slots: integers [N, max_tokens], where the tokens go: those that `prepare` gave for them.
      payload: as `read` gives it, of the layers from layer_begin (may be traced) on.

    Returns:
      (state, inbox, status i32[N]). GAP: tokens before these have not come; send from there again.
      STALE_ROW: the row is free, its transfer has another id, or its length is not what the
      transfer has made it. BAD_ROW also for tokens, layers or slots that are not the transfer's. If
      any row fails, nothing has changed.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_state(state)
    given = {"rows": rows, "ids": ids, "begins": begins, "ends": ends}
    indices = [as_index(name, value) for name, value in given.items()]
    for name, x in zip(given, indices, strict=True):
        check_shape(name, x, "N", (None,) if name == "rows" else indices[0].shape)
    slots = as_index("slots", slots)
    check_shape("slots", slots, "N max_tokens", (*indices[0].shape, None))
    _check_payload(state, payload, slots.shape)
    layer_begin = as_index("layer_begin", layer_begin)
    return _receive(state, inbox, *indices, slots, payload, layer_begin)


def check_state(state: KVState) -> None:
    """A ValueError for a state that cannot be transferred: of groups, or latent."""
    expect(isinstance(state, KVState), "state", "a KVState", kind_text(state))
    one = len(state.groups) == 1 and not state.groups[0].is_latent
    expect(one, "state", "one of K and V of a single group", f"one of {state.kinds}")


def _slid(table: PageTable) -> tuple[Any, Any]:
    """num_pinned and slot_offset of all rows, or twice None."""
    windows = table.windows
    return (None, None) if windows is None else (windows.num_pinned, windows.slot_offset)


def _check_payload(state: KVState, payload: Payload, sizes_of_slots: tuple[int, ...]) -> None:
    per_token = is_per_token(state.k_scale)
    num_layers, most = payload.k.shape[0] if payload.k.ndim else None, state.k_pages.shape[0]
    expect(
        num_layers is None or num_layers <= most, "payload.k", f"at most {most} layers", num_layers
    )
    for pool, pages_, tokens, scale in (
        ("k", state.k_pages, payload.k, payload.k_scale),
        ("v", pool_of_v(state.k_pages, state.v_pages, state.layout), payload.v, payload.v_scale),
    ):
        shape = pages_shape(pages_, state.layout, "k" if pool == "k" else "v")
        axes = "num_layers N max_tokens num_kv_heads head_dim"
        sizes = (num_layers, *sizes_of_slots, shape.num_kv_heads, shape.head_dim)
        check_shape(f"payload.{pool}", tokens, axes, sizes)
        if tokens.dtype != pages_.dtype:
            raise ValueError(
                f"payload.{pool}: expected dtype {pages_.dtype.name}, got {tokens.dtype.name}"
            )
        if (scale is not None) != per_token:
            expected, got = ("scales", "None") if per_token else ("None", "scales")
            raise ValueError(f"payload.{pool}_scale: expected {expected}, got {got}")
        if per_token:
            check_shape(f"payload.{pool}_scale", scale, axes.rsplit(" ", 1)[0], sizes[:-1])


def _receive(state, inbox, *operands):
    pools = (state.k_pages, state.v_pages, state.k_scale, state.v_scale)
    pools, table, inbox, status = _write(state.layout, pools, state.table, inbox, *operands)
    return state.with_pages(0, *pools).replace(table=table), inbox, status


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _write(
    layout, pools, table, inbox, rows, ids, begins, ends, slots, payload: Payload, layer_begin
):
    takes_part, bad, safe = look_up(rows, table.max_seqs)
    count, width = payload.k.shape[0], slots.shape[1]
    received, seq_lens = inbox.received[safe], table.seq_lens[safe]  # [N, num_layers], [N]
    layers = jnp.arange(received.shape[1], dtype=jnp.int32)
    among = (layers >= layer_begin) & (layers - count < layer_begin)
    bad |= (begins < inbox.begins[safe]) | (ends > inbox.ends[safe]) | (begins > ends)
    bad |= (ends - begins > width) | (layer_begin < 0) | (layer_begin > layers.size - count)
    is_new = jnp.any(among[None] & (received < ends[:, None]), axis=1)
    gap = jnp.any(among[None] & (received < begins[:, None]), axis=1)
    own = slots_of_ranges(
        table.num_pages, table.page_size, width, table.page_table, safe, begins, ends,
        *_slid(table),
    )  # fmt: skip
    token = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    elsewhere = jnp.any((token < ends[:, None]) & (slots != own), axis=1)
    is_own = table.is_live[safe] & (inbox.ids[safe] == ids) & (ids >= 0)
    is_own &= ~is_new | (seq_lens == jnp.min(received, axis=1))
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
    reached = jnp.where(among[None], jnp.maximum(received, ends[:, None]), received)
    grown = jnp.where(is_new, jnp.min(reached, axis=1), seq_lens)
    index = jnp.where(live, rows, table.max_seqs)
    table = replace(
        table, seq_lens=table.seq_lens.at[index].set(grown, mode="drop"), num_free=table.num_free
    )
    reached = inbox.received.at[index].set(reached, mode="drop")
    return pools, table, dataclasses.replace(inbox, received=reached), status


def _at(x, number):
    """Tokens of one layer of a payload, flat."""
    return None if x is None else x[number].reshape(-1, *x.shape[3:])


def _write_layer(layout, pools, slots, tokens: Payload, layer):
    k_pages, v_pages, k_scale, v_scale = pools
    k, v = tokens.k, tokens.v
    if is_eight_bit(k_pages):  # exact, and written as they are: without a scale
        k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    k_pages, v_pages, *_ = write_kv(k_pages, v_pages, k, v, slots, layer=layer, layout=layout)
    if is_per_token(k_scale):
        k_scale, v_scale = reference.write_scales(
            k_scale, v_scale, tokens.k_scale, tokens.v_scale, slots, layer
        )
    return k_pages, v_pages, k_scale, v_scale
