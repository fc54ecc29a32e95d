# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a generation: one prefill chunk, and the decode loop.

Both donate the `KVState`, so its pages are updated in place. A program is compiled once per model
and per size: prompts are packed into chunks of a few fixed sizes (`plan_chunks`), and the number of
decode steps is traced.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_paged.cache.state import KVState
from jax_paged.checks.status import Status

from .protocol import Graph, run_model
from .sample import Sampler

_SMALLEST_CHUNK = 8
TOKENS_PER_STEP = 64  # what a step costs beside its tokens, in tokens


class Reason(enum.IntEnum):
    """Why a row stopped; the names in lower case are `Generation.stop_reasons`."""

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    POOL_FULL = 3
    ROW_FULL = 4
    INTERRUPTED = 5
    STOP_STRING = 6


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one prefill step, row after row, padded to a size that is compiled once."""

    tokens: np.ndarray  # i32[T]
    counts: np.ndarray  # i32[S], tokens of each row
    num_tokens: int  # without padding


def chunk_size(num_tokens: int) -> int:
    """The compiled size for a chunk: the next power of two, at least 8."""
    return max(_SMALLEST_CHUNK, 1 << (num_tokens - 1).bit_length())


def cheapest_sizes(count: int, sizes: Sequence[int]) -> list[int]:
    """Of the sizes, ascending, those of the steps that feed `count` tokens soonest.

    All but the last are full.

    >>> cheapest_sizes(138, [32, 128, 512]), cheapest_sizes(400, [32, 128, 512])
    ([128, 32], [512])
    """
    one = [next(size for size in sizes if size >= count)]
    below = max((size for size in sizes if size < count), default=None)
    if below is None:
        return one
    several = [below, *cheapest_sizes(count - below, sizes)]
    return min(one, several, key=lambda found: sum(found) + TOKENS_PER_STEP * len(found))


def plan_chunks(
    texts: Sequence[np.ndarray], chunk: int, size: Callable[[int], int] = chunk_size
) -> Iterator[Chunk]:
    """Packs the tokens of several rows, in row order, into chunks of at most `chunk` tokens.

    A row may span chunks and a chunk may hold many rows; only the last one has padding, up to
    size(its tokens).

    >>> [(c.tokens.size, c.counts.tolist()) for c in plan_chunks([np.arange(3), np.arange(9)], 8)]
    [(8, [3, 5]), (8, [0, 4])]
    """
    ends = np.cumsum([len(text) for text in texts])
    flat = np.concatenate([*texts, np.zeros(0, np.int32)]).astype(np.int32)
    for start in range(0, len(flat), chunk):
        stop = min(start + chunk, len(flat))
        inside = np.clip(ends, start, stop)
        counts = np.diff(inside, prepend=start).astype(np.int32)
        tokens = np.zeros(size(stop - start), np.int32)
        tokens[: stop - start] = flat[start:stop]
        yield Chunk(tokens, counts, stop - start)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def prefill(
    graph: Graph,
    params: Any,
    state: KVState,
    rows: Int[Array, "rows"],
    counts: Int[Array, "rows"],
    tokens: Int[Array, "tokens"],
) -> KVState:
    """Appends counts[i] tokens to row rows[i]: their K and V, no logits.

    The rows must have reserved the pages. The last token of a prompt is not prefilled: the decode
    loop takes it first, and so computes the only logits that a prompt needs.
    """
    state, batch, _ = state.step(rows, counts, num_tokens=tokens.shape[0])
    _, state = run_model(graph, params, tokens, batch, state, logit_rows=jnp.zeros(0, jnp.int32))
    return state


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def prefill_within(
    graph: Graph,
    params: Any,
    state: KVState,
    rows: Int[Array, "rows"],
    counts: Int[Array, "rows"],
    tokens: Int[Array, "tokens"],
) -> tuple[KVState, Int[Array, "rows"]]:
    """`prefill` of rows that reserve their pages now: layers with windows never hold more.

    Returns:
      (state, reasons) as `make_room` gives them; a row that got no page has been released.
    """
    bare, reasons = make_room(state.bare, rows, counts)
    rows = jnp.where(reasons == int(Reason.RUNNING), rows, -1)
    return prefill(graph, params, state.with_tables(bare), rows, counts, tokens), reasons


def make_room(
    table: KVState, rows: Int[Array, "rows"], num_tokens: Int[Array, "rows"] | int
) -> tuple[KVState, Int[Array, "rows"]]:
    """Reserves pages for as many of the rows as possible; the others are released.

    The first row that gets no page is given up, so that its pages serve the rows after it, until
    all that remain are served. A row of −1 takes no part.

    Args:
      table: the tables of a state (`KVState.bare`).

    Returns:
      (table, reasons i32[rows]): RUNNING, POOL_FULL or ROW_FULL.
    """

    def attempt(table, rows):
        table, status = table.reserve(rows, num_tokens)
        reasons = jnp.select(
            [status == int(Status.POOL_FULL), status == int(Status.ROW_FULL)],
            [jnp.int32(Reason.POOL_FULL), jnp.int32(Reason.ROW_FULL)],
            jnp.int32(Reason.RUNNING),
        )
        return table, reasons

    def someone_waits(carry):
        _, _, waiting, _ = carry
        return jnp.any(waiting != int(Reason.RUNNING))

    def give_one_up(carry):
        table, rows, waiting, reasons = carry
        first = jnp.argmax(waiting != int(Reason.RUNNING)).astype(jnp.int32)
        row = rows[first]
        table, _ = table.release(jnp.where(table.free_rows[row], -1, row)[None])
        rows = rows.at[first].set(jnp.int32(-1))
        reasons = reasons.at[first].set(waiting[first])
        table, waiting = attempt(table, rows)
        return table, rows, waiting, reasons

    table, waiting = attempt(table, rows)
    carry = (table, rows, waiting, jnp.zeros_like(waiting))
    table, _, _, reasons = jax.lax.while_loop(someone_waits, give_one_up, carry)
    return table, reasons


admit = jax.jit(make_room)
release = jax.jit(KVState.release)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where each row of a generation stands."""

    last: jax.Array  # i32[rows], the token to feed next
    made: jax.Array  # i32[rows], new tokens so far
    reasons: jax.Array  # i32[rows], Reason

    def after(
        self, new: jax.Array, running: jax.Array, limits: jax.Array, stop_tokens: jax.Array
    ) -> tuple["Progress", jax.Array]:
        """(progress, which tokens are kept) when the rows that run have drawn i32[rows] tokens.

        Args:
          limits, stop_tokens: as for `decode`.
        """
        stop = running & jnp.any(new[:, None] == stop_tokens[None, :], axis=1)
        kept = running & ~stop
        made = self.made + kept.astype(jnp.int32)
        reasons = jnp.where(stop, jnp.int32(Reason.STOP_TOKEN), self.reasons)
        reasons = jnp.where(kept & (made >= limits), jnp.int32(Reason.LENGTH), reasons)
        return Progress(jnp.where(kept, new, self.last), made, reasons), kept


@functools.partial(jax.jit, static_argnames=("graph", "chunk", "keep"), donate_argnames="state")
def decode(
    graph: Graph,
    params: Any,
    state: KVState,
    progress: Progress,
    rows: Int[Array, "rows"],
    limits: Int[Array, "rows"],
    stop_tokens: Int[Array, "stops"],
    sampler: Sampler,
    num_steps: Int[Array, ""],
    *,
    chunk: int,
    keep: bool = False,
) -> tuple[KVState, Progress, Int[Array, "rows chunk"]]:
    """Up to num_steps ≤ chunk decode steps in one loop; ends early when no row runs.

    A step reserves pages, feeds each running row its last token, draws the next one and stops rows;
    a row that stops releases its pages in that step.

    Args:
      limits: new tokens after which a row stops.
      stop_tokens: ids that end a row; they are not kept. −1 matches nothing.
      keep: rows that stop keep their pages, unless there was no page for them.

    Returns:
      (state, progress, tokens): the tokens of each step, −1 where a row made none.
    """
    num_rows = rows.shape[0]

    def step(carry):
        number, state, progress, out = carry
        running = progress.reasons == int(Reason.RUNNING)
        table, reasons = make_room(state.bare, jnp.where(running, rows, -1), 1)
        reasons = jnp.where(running, reasons, progress.reasons)
        running = reasons == int(Reason.RUNNING)

        state = state.with_tables(table)
        state, batch, _ = state.step(jnp.where(running, rows, -1), 1)
        logits, state = run_model(graph, params, progress.last, batch, state)
        new = sampler(logits, jnp.arange(num_rows, dtype=jnp.int32), progress.made)

        progress = dataclasses.replace(progress, reasons=reasons)
        progress, kept = progress.after(new, running, limits, stop_tokens)
        out = out.at[:, number].set(jnp.where(kept, new, -1))
        stopped = running & (progress.reasons != int(Reason.RUNNING))
        table = state.bare if keep else _release_if_any(state.bare, rows, stopped)
        return number + 1, state.with_tables(table), progress, out

    def goes_on(carry):
        number, _, progress, _ = carry
        return (number < num_steps) & jnp.any(progress.reasons == int(Reason.RUNNING))

    out = jnp.full((num_rows, chunk), -1, jnp.int32)
    carry = (jnp.int32(0), state, progress, out)
    _, state, progress, out = jax.lax.while_loop(goes_on, step, carry)
    return state, progress, out


def _release_if_any(
    table: KVState, rows: Int[Array, "rows"], which: Bool[Array, "rows"]
) -> KVState:
    def release(table):
        return table.release(jnp.where(which, rows, -1))[0]

    return jax.lax.cond(jnp.any(which), release, lambda table: table, table)
