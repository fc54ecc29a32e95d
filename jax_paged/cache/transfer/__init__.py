# SPDX-License-Identifier: Apache-2.0
"""Moving K and V from one cache to another: prefill here, decode there.

The receiver `prepare`s a row and gives the sender a `Ticket`: which transfer this is, from which
token on, and the slot of each token in the receiver's cache, compressed. A `Sender` turns that
into `Message`s as its row grows, for each group of layers its own; `deliver` writes them into the
receiver's cache.

    # the receiver
    state, inbox, ids, slots, status = prepare(state, inbox, [row], [num_tokens])
    ticket = Ticket.create(state, ids[0], row, begin, num_tokens, slots[0])
    # the sender, then again and again as its row grows
    sender.mark(its_row, ticket, length)
    messages = sender.messages(its_state, {its_row: length}, max_tokens=256)
    # the receiver, for each of them
    state, inbox, status = deliver(state, inbox, [message])

What travels are plain values: tickets and messages turn into bytes and back, and the arrays of a
message may as well go from device to device by `jax.device_put`. A CRC finds damage. Fields that
make no sense are a ValueError before memory is taken for what they promise. Stored values travel as
they are, 8-bit ones with their scales. Layout, page size and the number of pages may differ; what
both sides must have alike is their `Geometry`. To a new row, layers with a window bring only what
its next token will see: the sender's windows may have slid before.

A message may be lost, come twice or out of turn: its tokens' numbers are its place in the sequence,
as TCP counts bytes. `receive` takes only what leaves no gap, never writes a token twice and lets a
row's length follow what is there in all layers; the sender goes back by `Sender.rewind`. The
protocol (compressed position maps, begin, one receiver per row) is that of TVM's paged KV cache,
whose sender writes into the receiver's memory by itself; here the receiver does.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.pools import KVGroup
from jax_paged.cache.state import KVState, LayerKind
from jax_paged.cache.transfer.inbox import (
    Inbox,
    Payload,
    check_state,
    forget,
    prepare,
    read,
    receive,
)
from jax_paged.cache.transfer.wire import frame, unframe
from jax_paged.checks import check_size, expect, is_per_token
from jax_paged.checks.fields import (
    ANYTHING,
    OBJECT,
    TEXT,
    Domain,
    check_fields,
    either,
    integer,
    list_of,
    one_of,
    short,
)
from jax_paged.layout import kv_heads_axis, pages_shape, pool_of_v
from jax_paged.ops.batch import pages_for

__all__ = [
    "Geometry",
    "Inbox",
    "Message",
    "Payload",
    "Sender",
    "Ticket",
    "compress_positions",
    "deliver",
    "expand_positions",
    "forget",
    "prepare",
    "read",
    "receive",
]


def compress_positions(positions: Any) -> list[int]:
    """Runs of a position map: [n, begin_1, length_1, …, begin_n, length_n].

    Args:
      positions: integers [tokens], the slot of each token, -1 = none. A -1 is a run of its own, so
        it is never taken for the slot before slot 0.

    Raises:
      ValueError: it is not flat, or holds something below -1.

    >>> compress_positions([8, 9, 10, 4, 5, -1, -1, 0])
    [5, 8, 3, 4, 2, -1, 1, -1, 1, 0, 1]
    """
    flat = np.asarray(positions)
    ok = flat.ndim == 1 and (flat.size == 0 or np.issubdtype(flat.dtype, np.integer))
    expect(ok, "positions", "integers [tokens]", f"{flat.dtype.name} {list(flat.shape)}")
    flat = flat.astype(np.int64)
    if flat.size == 0:
        return [0]
    expect(flat.min() >= -1, "positions", "slots or -1", flat.min())
    joined = (flat[1:] == flat[:-1] + 1) & (flat[:-1] >= 0)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    lengths = np.diff(np.append(first, flat.size))
    return [len(first), *np.stack([flat[first], lengths], axis=1).ravel().tolist()]


def expand_positions(
    compressed: Sequence[int], *, begin: int = 0, end: int | None = None
) -> np.ndarray:
    """The i32[tokens] that `compress_positions` made it from, or those begin ≤ t < end of them.

    A few runs may stand for any number of tokens; those of [begin, end) alone take memory.

    Raises:
      ValueError: it is not of the form [n, begin, length, …], a number is out of range, or there
        are fewer than `end` tokens.

    >>> print(expand_positions([3, 8, 3, -1, 1, 0, 1]))
    [ 8  9 10 -1  0]
    >>> print(expand_positions([3, 8, 3, -1, 1, 0, 1], begin=2, end=4))
    [10 -1]
    """
    begins, lengths = _runs(compressed)
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    end = total if end is None else end
    expect(0 <= begin <= end <= total, "positions", f"at least {end} tokens", total)
    counts = np.clip(ends, begin, end) - np.clip(ends - lengths, begin, end)
    return (np.repeat(begins - ends + lengths, counts) + np.arange(begin, end)).astype(np.int32)


_RUNS = list_of(integer(-1))


def _runs(compressed: Any) -> tuple[np.ndarray, np.ndarray]:
    """(begins, lengths) of the runs of a compressed position map, i64[n] each; checks them."""
    if isinstance(compressed, np.ndarray):
        compressed = compressed.tolist()
    ok = _RUNS.has(compressed) and len(compressed) > 0 and len(compressed) == 2 * compressed[0] + 1
    expect(ok, "positions", "[n, begin, length, …] with n pairs", short(compressed))
    flat = np.asarray(compressed, np.int64)
    begins, lengths = flat[1::2], flat[2::2]
    fits = (lengths >= 1) & (begins + lengths < 2**31) & ((begins >= 0) | (lengths == 1))
    expect(bool(fits.all()), "positions", "runs of slots, each -1 on its own", short(compressed))
    return begins, lengths


def _check(name: str, value: Any, domains: Mapping[str, Domain]) -> None:
    """Holds the fields of a dataclass against their domains; JSON gives any of any type."""
    check_fields(name, {field: getattr(value, field) for field in domains}, domains)


_COUNT, _INDEX = integer(1), integer(0)
_NAME = Domain("a text of at most 64 characters", lambda value: TEXT.has(value) and len(value) < 65)
_KIND = either(one_of("full", "mla"), _COUNT)
_GEOMETRY = {
    "tensor_degree": _COUNT, "pipeline_degree": _COUNT, "stage": _INDEX, "num_layers": _COUNT,
    "layer_kinds": list_of(_KIND), "num_kv_heads": list_of(_COUNT), "head_dim": list_of(_COUNT),
    "v_head_dim": list_of(_INDEX), "dtype": list_of(_NAME), "scales": list_of(_NAME),
}  # fmt: skip
_TICKET = {"id": _INDEX, "row": _INDEX, "begin": _INDEX, "end": _INDEX, "positions": ANYTHING}
_MESSAGE = _TICKET | {"group": _INDEX, "layer_begin": _INDEX}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the caches of sender and receiver must have alike."""

    tensor_degree: int  # devices that the KV heads are split over
    pipeline_degree: int  # stages that the layers are split over
    stage: int  # which of them this is
    num_layers: int  # of this stage
    layer_kinds: list[LayerKind]  # of these layers
    # Of each group of layers, as this state has it; latent rows are one head and have no V.
    num_kv_heads: list[int]
    head_dim: list[int]
    v_head_dim: list[int]
    dtype: list[str]
    scales: list[str]  # "none", "per token", or a digest of those that were given

    def __post_init__(self):
        _check("geometry", self, _GEOMETRY)
        ok = len(self.layer_kinds) == self.num_layers
        expect(ok, "geometry.layer_kinds", f"{self.num_layers} of them", len(self.layer_kinds))
        count = len(self.groups)
        for name in ("num_kv_heads", "head_dim", "v_head_dim", "dtype", "scales"):
            have = len(getattr(self, name))
            expect(have == count, f"geometry.{name}", f"one for each of {count} groups", have)

    @property
    def groups(self) -> list[LayerKind]:
        """The kind of each group, as `KVState.kinds`."""
        return list(dict.fromkeys(self.layer_kinds))

    @staticmethod
    def create(
        state: KVState, *, tensor_degree: int | None = None, pipeline_degree: int = 1,
        stage: int = 0,
    ) -> "Geometry":  # fmt: skip
        """That of a state.

        Args:
          tensor_degree: None = as the pages of `state` are split by heads; to be given where each
            process has a state with its own heads only.
          pipeline_degree, stage: how many stages the layers are split over, and which this one is.

        Raises:
          ValueError: a degree is no integer or below 1, or the stage is not one of them.
        """
        check_state(state)
        if tensor_degree is None:
            tensor_degree = max(map(_tensor_degree, state.groups))
        pipeline_degree = check_size("pipeline_degree", pipeline_degree)
        expect(0 <= stage < pipeline_degree, "stage", f"one of {pipeline_degree}", stage)
        heads, head_dims, v_head_dims = zip(*map(_sizes, state.groups), strict=True)
        return Geometry(
            tensor_degree=check_size("tensor_degree", tensor_degree),
            pipeline_degree=pipeline_degree,
            stage=stage,
            num_layers=len(state.layer_kinds),
            layer_kinds=list(state.layer_kinds),
            num_kv_heads=list(heads),
            head_dim=list(head_dims),
            v_head_dim=list(v_head_dims),
            dtype=[group.k_pages.dtype.name for group in state.groups],
            scales=list(map(_scales, state.groups)),
        )

    def check(self, receiver: "Geometry") -> None:
        """Raises a ValueError that names the first field in which the receiver differs."""
        for name, mine in dataclasses.asdict(self).items():
            theirs = getattr(receiver, name)
            expected = f"{short(theirs)}, as the receiver has it"
            expect(mine == theirs, name, expected, short(mine))


def _tensor_degree(group: KVGroup) -> int:
    """How many devices the heads of a group are split over."""
    if group.is_latent:
        return 1
    axis = kv_heads_axis(group.k_pages, group.layout)
    local = group.k_pages.sharding.shard_shape(group.k_pages.shape)
    return group.k_pages.shape[axis] // local[axis]


def _sizes(group: KVGroup) -> tuple[int, int, int]:
    """num_kv_heads, head_dim and v_head_dim of a group."""
    if group.is_latent:
        return 1, group.k_pages.shape[-1], 0
    k = pages_shape(group.k_pages, group.layout)
    v_pages = pool_of_v(group.k_pages, group.v_pages, group.layout)
    return k.num_kv_heads, k.head_dim, pages_shape(v_pages, group.layout, "v").head_dim


def _scales(group: KVGroup) -> str:
    """Which scales a group has, for `Geometry`."""
    if group.k_scale is None:
        return "none"
    if is_per_token(group.k_scale):
        return "per token"
    given = [np.asarray(x).tobytes() for x in (group.k_scale, group.v_scale) if x is not None]
    return hashlib.blake2b(b"".join(given), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a sender must know of a row that waits for tokens."""

    id: int  # of the transfer
    row: int  # of the receiver
    begin: int  # the first token that it waits for
    end: int  # the token behind the last one
    # Of each group, compressed: the receiver's slots of the tokens up to `end`. A group with a
    # window may wait for the last ones alone.
    positions: list[list[int]]
    geometry: Geometry

    def __post_init__(self):
        _check("ticket", self, _TICKET)
        count = len(self.geometry.groups)
        ok = isinstance(self.positions, (list, tuple)) and len(self.positions) == count
        expect(ok, "positions", f"a list for each of {count} groups", short(self.positions))
        least = min(self.begins)
        expect(least >= self.begin, "positions", f"none before token {self.begin}", least)

    @staticmethod
    def create(
        state: KVState, id: Any, row: int, begin: int, num_tokens: int, slots: Any,
        *, geometry: Geometry | None = None,
    ) -> "Ticket":  # fmt: skip
        """Of what `prepare` returned for a row; geometry: None = `Geometry.create(state)`."""
        positions = [compress_positions(x[x >= 0]) for x in np.asarray(slots)]
        geometry = Geometry.create(state) if geometry is None else geometry
        expect(int(id) >= 0, "id", "that of a prepared transfer", int(id))
        return Ticket(
            int(id), int(row), int(begin), int(begin) + int(num_tokens), positions, geometry
        )

    @property
    def begins(self) -> list[int]:
        """The first token that each group waits for."""
        return [self.end - int(_runs(one)[1].sum()) for one in self.positions]

    def to_bytes(self) -> bytes:
        """For `from_bytes`, anywhere."""
        return frame("ticket", dataclasses.asdict(self), [])

    @staticmethod
    def from_bytes(data: bytes) -> "Ticket":
        """Raises ValueError if the bytes are damaged or something else."""
        fields, _ = unframe("ticket", data, num_arrays=0)
        check_fields("ticket", fields, _TICKET | {"geometry": OBJECT})
        geometry = fields.pop("geometry")
        check_fields("geometry", geometry, _GEOMETRY)
        return Ticket(**fields, geometry=Geometry(**geometry))


@dataclasses.dataclass(frozen=True)
class Message:
    """Tokens begin ≤ t < end of some layers of a group, on their way to a row."""

    id: int  # of the transfer
    row: int  # of the receiver
    begin: int
    end: int
    positions: list[int]  # compressed: the receiver's slots of these tokens
    group: int  # its number in the state
    layer_begin: int  # the first of the group's layers
    payload: Payload  # [num_layers, max_tokens, …], of one row; what lies behind `end` is padding

    def __post_init__(self):
        _check("message", self, _MESSAGE)
        count, total = self.end - self.begin, int(_runs(self.positions)[1].sum())
        expect(count > 0, "message", f"an end behind begin={self.begin}", self.end)
        expect(total == count, "positions", f"{count} slots, one for each token", total)
        is_latent = self.payload.v is None
        axes = "num_layers, max_tokens" + ", num_kv_heads" * (not is_latent)
        for name, x in self.payload._asdict().items():
            if x is None:
                expect(name != "k", f"payload.{name}", "an array", None)
                continue
            is_scale = name.endswith("_scale")
            of_head = x.shape if is_scale else x.shape[:-1]
            ok = x.ndim == 4 - is_latent - is_scale and x.shape[1] >= count
            ok &= of_head == self.payload.k.shape[:-1] and x.size > 0
            of_x = axes + ", head_dim" * (not is_scale)
            expected = f"[{of_x}] of at least {count} tokens, the same for all arrays"
            expect(bool(ok), f"payload.{name}", expected, list(x.shape))

    def to_bytes(self) -> bytes:
        """For `from_bytes`, anywhere: a header, the tokens without padding, and a CRC."""
        count = self.end - self.begin
        arrays = [None if x is None else np.asarray(x)[:, :count] for x in self.payload]
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return frame("message", {n: x for n, x in fields.items() if n != "payload"}, arrays)

    @staticmethod
    def from_bytes(data: bytes) -> "Message":
        """Raises ValueError if the bytes are damaged or something else."""
        fields, arrays = unframe("message", data, num_arrays=len(Payload._fields))
        check_fields("message", fields, _MESSAGE)
        return Message(**fields, payload=Payload(*arrays))


class Sender:
    """The rows of a cache that are sent away, and how far.

    Args:
      state: the cache, for its sizes.
      geometry: of it; None = `Geometry.create(state)`.
    """

    def __init__(self, state: KVState, *, geometry: Geometry | None = None):
        self.geometry = Geometry.create(state) if geometry is None else geometry
        self._tickets: dict[int, Ticket] = {}
        self._sent: dict[int, int] = {}

    def mark(self, row: int, ticket: Ticket, length: int) -> None:
        """From now on the row is sent to where the ticket is from.

        Args:
          length: tokens that the row has now; those from the ticket's begin on are sent, and later
            ones as they come. A begin beyond them sends nothing old.

        Raises:
          ValueError: the row has a receiver already, a part of the `Geometry` differs, or nothing
            is left to prefill: a receiver has to wait for more tokens than there are already.
        """
        self.geometry.check(ticket.geometry)
        expect(row not in self._tickets, "row", "one receiver per row", f"a second for row {row}")
        left = f"more than {length} tokens waited for: at least one is left to prefill"
        expect(ticket.begin >= length or ticket.end > length, "ticket", left, ticket.end)
        self._tickets[row], self._sent[row] = ticket, min(ticket.begins)

    def unmark(self, row: int) -> None:
        """Sends no more of the row; an unknown row stays unknown."""
        self._tickets.pop(row, None)
        self._sent.pop(row, None)

    def rewind(self, row: int, token: int) -> None:
        """Sends again from this token on: what the receiver has not got.

        Raises:
          ValueError: the row is not sent, or the token is none of its transfer.
        """
        expect(row in self._tickets, "row", "a marked row", row)
        ticket = self._tickets[row]
        ok = ticket.begin <= token <= ticket.end
        expect(ok, "token", f"one in [{ticket.begin}, {ticket.end}]", token)
        self._sent[row] = token

    def is_sent(self, row: int) -> bool:
        """Whether all that the receiver of a marked row waits for has been in messages."""
        return self._sent[row] == self._tickets[row].end

    def messages(
        self, state: KVState, lengths: Mapping[int, int], *, max_tokens: int,
        layer_begin: int = 0, num_layers: int | None = None,
    ) -> list[Message]:  # fmt: skip
        """The next messages of marked rows that have grown: of a row at most one for each group.

        Args:
          lengths: tokens that each row has now; a marked row that is left out waits.
          max_tokens: most tokens of a message; fixed, as programs are compiled for it.
          layer_begin, num_layers: of which layers of the state, from 0 on; None = all. With fewer
            than all of them, the rows go on to their next tokens when the last layer is among them.

        Returns:
          One group after the other.

        Raises:
          ValueError: a size is wrong, the layers are not in the state, or tokens that are to go
            have slid out of their row's window: a row is sent before it lets go of them.
        """
        max_tokens = check_size("max_tokens", max_tokens)
        count = self.geometry.num_layers if num_layers is None else num_layers
        ok = 0 <= layer_begin < layer_begin + count <= self.geometry.num_layers
        within = f"layers within [0, {self.geometry.num_layers})"
        expect(ok, "layer_begin", within, f"[{layer_begin}, {layer_begin + count})")
        due = {}
        for row, ticket in self._tickets.items():
            begin = self._sent[row]
            end = min(lengths.get(row, 0), ticket.end, begin + max_tokens)
            if begin < end:
                due[row] = begin, end
        made = []
        kinds = self.geometry.layer_kinds
        before, among = kinds[:layer_begin], kinds[layer_begin : layer_begin + count]
        for group, kind in enumerate(self.geometry.groups):
            layers = before.count(kind), among.count(kind)
            made += self._of_group(state, group, due, max_tokens, *layers)
        if layer_begin + count == self.geometry.num_layers:
            self._sent |= {row: end for row, (_, end) in due.items()}
        return made

    def _of_group(
        self, state: KVState, group: int, due: Mapping[int, tuple[int, int]], max_tokens: int,
        layer_begin: int, num_layers: int,
    ) -> list[Message]:  # fmt: skip
        """The messages of some layers of a group; due: row → (begin, end)."""
        begins_of = {row: self._tickets[row].begins[group] for row in due}
        ranges = [
            (row, max(begin, begins_of[row]), end)
            for row, (begin, end) in due.items()
            if begins_of[row] < end
        ]
        if not ranges or num_layers == 0:
            return []
        _check_kept(state.groups[group].table, ranges)
        padding = [(-1, 0, 0)] * (_power_of_two(len(ranges)) - len(ranges))  # few programs
        rows, begins, ends = np.array(ranges + padding, np.int32).T
        payload = read(
            state, rows, begins, ends, max_tokens=max_tokens, group=group, layer_begin=layer_begin,
            num_layers=num_layers,
        )  # fmt: skip
        made = []
        for i, (row, begin, end) in enumerate(ranges):
            ticket, first = self._tickets[row], begins_of[row]
            slots = expand_positions(ticket.positions[group], begin=begin - first, end=end - first)
            own = Payload(*(None if x is None else x[:, i] for x in payload))
            positions = compress_positions(slots)
            made.append(
                Message(ticket.id, ticket.row, begin, end, positions, group, layer_begin, own)
            )
        return made


def _check_kept(table: PageTable, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Checks that no token of these ranges, (row, begin, end), has slid away."""
    windows = table.windows
    if windows is None:
        return
    pinned, offset = np.asarray(windows.num_pinned), np.asarray(windows.slot_offset)
    for row, begin, end in ranges:
        first = pages_for(int(pinned[row]), table.page_size) * table.page_size + int(offset[row])
        lost = max(begin, int(pinned[row]))
        ok = offset[row] == 0 or lost >= min(first, end)
        expect(bool(ok), "state", f"token {lost} of row {row}", "a row that it has slid out of")


def deliver(
    state: KVState, inbox: Inbox, messages: Sequence[Message]
) -> tuple[KVState, Inbox, jax.Array]:
    """`receive` for messages to different rows, all of the same layers; the pages are donated.

    Those of different groups go by calls of their own.

    Returns:
      (state, inbox, status i32[len(messages)]).

    Raises:
      ValueError: there is no message, they are of different layers or kinds, or what they bring
        does not fit the pages. Nothing has changed then.
    """
    expect(len(messages) > 0, "messages", "at least one", 0)
    layers = {(m.group, m.layer_begin, m.payload.k.shape[0]) for m in messages}
    text = "the same layers of one group in all"
    expect(len(layers) == 1, "messages", text, sorted(layers))
    kinds = {_kinds(m.payload) for m in messages}
    expect(len(kinds) == 1, "messages", "arrays of the same kinds in all", short(sorted(kinds)))
    width = max(m.payload.k.shape[1] for m in messages)
    width = _power_of_two(width) if all(_is_host(m) for m in messages) else width
    slots = np.full((len(messages), width), -1, np.int32)
    for i, message in enumerate(messages):
        slots[i, : message.end - message.begin] = expand_positions(message.positions)
    payload = Payload(
        *(None if parts[0] is None else _stacked(parts, width) for parts in zip(
            *(m.payload for m in messages), strict=True
        ))
    )  # fmt: skip
    columns = [[m.row, m.id, m.begin, m.end] for m in messages]
    rows, ids, begins, ends = np.array(columns, np.int32).T
    group, layer_begin, _ = layers.pop()
    return receive(
        state, inbox, rows, ids, begins, ends, slots, payload, group=group, layer_begin=layer_begin
    )


def _kinds(payload: Payload) -> tuple[str, ...]:
    """The dtypes and shapes of a payload's arrays, whose numbers of tokens may differ."""
    return tuple(
        "none" if x is None else f"{x.dtype.name}{[x.shape[0], *x.shape[2:]]}" for x in payload
    )


def _is_host(message: Message) -> bool:
    return isinstance(message.payload.k, np.ndarray)


def _stacked(parts: Sequence[Any], width: int) -> Any:
    """One axis of messages behind that of layers, the tokens of each padded to `width`."""
    xp = np if isinstance(parts[0], np.ndarray) else jnp
    padded = []
    for x in parts:
        pad = [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
        padded.append(xp.pad(x, pad) if x.shape[1] < width else x)
    return xp.stack(padded, axis=1)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
