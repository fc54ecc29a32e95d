# SPDX-License-Identifier: Apache-2.0
"""K and V of a request, from one engine to another: a prompt is prefilled here and goes on there.

    request = prefiller.submit(prompt[:-1], max_new_tokens=0, hand_out=True)
    prefiller.run()
    ticket = prefiller.hand_out(request)
    engine.receive(prompt, ticket, max_new_tokens=64, temperature=0.8)

Both engines swap: what one has copied to host memory, the other copies in as if it were its own. At
least one token of the prompt is left to the second engine, which draws all new ones. So a ticket is
of tokens alone, however they will be drawn. Stored values travel as they are, 8-bit ones with their
scales, and a draft model's with them. The engines may be split over devices differently: a piece is
what one device has.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for


class Piece(NamedTuple):
    """What one device has of some pages of a row.

    pool: of K, V and their scales per token, then of those of a draft model.
    page: the first one, in the row.
    head: the first one, of the model's KV heads.
    values: [num_layers, pages, heads, …], as they are stored.
    """

    pool: int
    page: int
    head: int
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class PrefillTicket:
    """What an engine says of the K and V of some tokens, with these.

    facts: what both engines must have alike, by name (`facts_of`).
    num_tokens, digest: how many tokens, and which (`digest_of`).
    adapter: the name of the one that they were computed with, or None.
    pieces: all pages of these tokens.
    """

    facts: Mapping[str, str]
    num_tokens: int
    digest: str
    adapter: str | None = None
    pieces: Sequence[Piece] = ()

    def check(self, facts: Mapping[str, str], tokens: Sequence[int], adapter: str | None) -> None:
        """Checks that it is for an engine with these facts, and for a request.

        Args:
          tokens: that the request has.
          adapter: its own, by name.

        Raises:
          ValueError: it is not; the message names what differs.
        """
        check_alike(facts, self.facts, "ticket.", "this engine")
        most = len(tokens) - 1
        ok = type(self.num_tokens) is int and 0 < self.num_tokens <= most
        text = f"an integer from 1 to {most}: at least one token is left to feed"
        expect(ok, "ticket.num_tokens", text, self.num_tokens)
        mine = digest_of(tokens[: self.num_tokens])
        what = f"{mine}, of the first {self.num_tokens} tokens of the request"
        expect(self.digest == mine, "ticket.digest", what, self.digest)
        expect(self.adapter == adapter, "ticket.adapter", repr(adapter), repr(self.adapter))


def check_alike(wanted: Mapping[str, Any], got: Mapping[str, Any], label: str, whose: str) -> None:
    """Checks that two have the same facts.

    Args:
      label: what stands before the name of a fact.
      whose: the wanted ones are.

    Raises:
      ValueError: they differ; the message names the first one that does, and what both have.
    """
    for name in sorted({*wanted, *got}):
        want, have = wanted.get(name), got.get(name)
        expect(want == have, label + name, f"{want}, as {whose} has", have)


def digest_of(tokens: Sequence[int]) -> str:
    """Which tokens these are."""
    return _digest(np.asarray(tokens, np.int32).tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def facts_of(
    of_model: Mapping[str, str], params: Any, corners: Mapping[str, np.ndarray],
    shapes: Sequence[jax.ShapeDtypeStruct], weight_version: int,
) -> dict[str, str]:  # fmt: skip
    """What pages depend on beside tokens and adapter, however the model is split over devices.

    Args:
      of_model: its dtype and configuration, by name.
      params: its weights.
      corners: the first values of each, which tell one checkpoint from another (`corners_of`).
      shapes: of a page in each pool (`Swapper.page_shapes`).
    """
    leaves = jax.tree.leaves(params)
    known = b"".join(name.encode() + corners[name].tobytes() for name in sorted(corners))
    dtypes = sorted({np.dtype(x.dtype).name for x in leaves})
    places = (".mesh", ".slots of experts")
    facts = {name: value for name, value in of_model.items() if not name.endswith(places)}
    pools = {f"pool {i}": f"{x.dtype.name}{list(x.shape)}" for i, x in enumerate(shapes)}
    weights = {"dtypes of weights": ", ".join(dtypes), "digest of weights": _digest(known)}
    return {**facts, **pools, **weights, "weight_version": str(weight_version)}


class ArrivingRow:
    """The pages of a row, as its pieces come.

    Args:
      shapes: of a page in each pool: [num_layers, heads, …].
      num_pages: of the row.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], num_pages: int):
        self._shapes, self._num_pages = shapes, num_pages
        self.pools = [
            np.zeros((x.shape[0], num_pages, *x.shape[1:]), x.dtype) for x in shapes
        ]  # of these, only what has come takes memory
        self._is_here = [np.zeros((num_pages, x.shape[1]), np.bool_) for x in shapes]

    def check(self, pool: int, page: int, head: int, shape: Sequence[int], dtype: Any) -> None:
        """Checks that a piece with these numbers is one of the row, and has not come before.

        Raises:
          ValueError: it is not; the message names what is wrong.
        """
        count = len(self._shapes)
        expect(0 <= pool < count, "piece.pool", f"one of {count}", pool)
        like = self._shapes[pool]
        layers, heads, *rest = like.shape
        expect(np.dtype(dtype) == like.dtype, "piece.dtype", like.dtype.name, np.dtype(dtype).name)
        ok = len(shape) == len(rest) + 3 and (shape[0], *shape[3:]) == (layers, *rest)
        expect(ok, "piece.shape", f"{[layers, 'pages', 'heads', *rest]}", list(shape))
        for name, first, size, most in (
            ("page", page, shape[1], self._num_pages), ("head", head, shape[2], heads)
        ):  # fmt: skip
            ok = 0 <= first < first + size <= most
            expect(ok, f"piece.{name}", f"some of {most} {name}s", f"{size} from {first} on")
        here = self._is_here[pool][page : page + shape[1], head : head + shape[2]]
        text = f"each page of each head once (pool {pool}, page {page}, head {head})"
        expect(not here.any(), "piece", text, "one that has come before")

    def take(self, piece: Piece) -> None:
        """Takes a piece.

        Raises:
          ValueError: as `check`.
        """
        pool, page, head, values = piece
        self.check(pool, page, head, values.shape, values.dtype)
        if values.shape == self.pools[pool].shape:
            self.pools[pool] = values
        else:
            pages, heads = values.shape[1:3]
            self.pools[pool][:, page : page + pages, head : head + heads] = values
        self._is_here[pool][page : page + values.shape[1], head : head + values.shape[2]] = True

    @property
    def is_whole(self) -> bool:
        """Whether all pieces have come."""
        return all(here.all() for here in self._is_here)


def row_of(
    ticket: PrefillTicket, shapes: Sequence[jax.ShapeDtypeStruct], page_size: int
) -> list[Any]:
    """The pages of a ticket: of each pool [num_layers, pages, heads, …].

    Raises:
      ValueError: a piece is missing, comes twice or is not one of these pages.
    """
    row = ArrivingRow(shapes, pages_for(ticket.num_tokens, page_size))
    for piece in ticket.pieces:
        row.take(piece)
    expect(row.is_whole, "ticket.pieces", "all pages of its tokens", "only some")
    return row.pools
