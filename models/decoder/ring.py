# SPDX-License-Identifier: Apache-2.0
"""The decode loop of a model in pipeline stages, which stay busy from step to step.

The rows go around the stages in M micro-batches, M ≥ pp. At tick t stage s works on event t − s,
which is step event // M of micro-batch event % M. The first stage embeds a token of each row. The
last one draws the next and sends it on to the first, as if the stages were a ring, where it is in
time for the micro-batch's next step. So the stages run dry at the end of a call alone: of its
N · M + pp − 1 ticks a stage works in N · M. The program counts them (`Busy`).

One array travels in a tick: what the layers give for the rows, their tokens, and when the loop
ends. On the way all are integers, so that no bit changes. Pages for all steps are reserved before
the loop, so that all stages have the same table.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jax_paged.cache.state import KVState
from jax_paged.checks.status import Status

from .adapters import param_specs
from .partition import PP
from .protocol import Graph, merge_model
from .sample import Sampler
from .steps import Progress, Reason, make_room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Busy:
    """The ticks of a decode loop."""

    ticks: Any  # i32[], of the loop
    worked: Any  # i32[stages], in which the stage had a row that runs


def fewest_steps(micro_batches: int, pp: int) -> int:
    """The decode steps in which stages work in at least nine of ten ticks.

    >>> [fewest_steps(micro_batches, 4) for micro_batches in (4, 8, 32)]
    [7, 4, 1]
    """
    return -(-9 * (pp - 1) // micro_batches)


@functools.partial(
    jax.jit, static_argnames=("graph", "micro_batches", "chunk"), donate_argnames="state"
)
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
    micro_batches: int,
    chunk: int,
) -> tuple[KVState, Progress, Int[Array, "rows chunk"], Busy]:
    """`steps.decode` for a model in stages, whose rows give their pages back; with the same tokens.

    It may do fewer than num_steps steps where pages are scarce: as many as there are pages for, or
    one, for which rows may have to be given up.

    Args:
      micro_batches: how many, at least as many as stages. Rows that run are spread evenly.
      others: as for `steps.decode`.
    """
    model: Any = merge_model(graph, params)
    running = progress.reasons == int(Reason.RUNNING)
    left = limits - progress.made
    num_steps = jnp.minimum(num_steps, jnp.max(jnp.where(running, left, 0)))
    own_rows = jnp.where(running, rows, -1)
    table, reasons, num_steps = _room_for_steps(state.bare, own_rows, left, num_steps)
    progress = dataclasses.replace(
        progress, reasons=jnp.where(running, reasons, progress.reasons)
    )  # fmt: skip
    running = progress.reasons == int(Reason.RUNNING)

    local = functools.partial(_around, graph, micro_batches, chunk)
    specs: Any = model.partition.state_specs(state)
    whole: Any = P()
    given = progress, rows, limits, stop_tokens, sampler, num_steps
    state, progress, out, busy = jax.shard_map(
        local, mesh=model.partition.mesh, check_vma=False,
        in_specs=(param_specs(model.partition, params), specs, *[whole] * len(given)),
        out_specs=(specs, whole, whole, whole),
    )(params, state.with_tables(table), *given)  # fmt: skip

    goes_on = progress.reasons == int(Reason.RUNNING)
    state, _ = state.release(jnp.where(running & ~goes_on, rows, -1))
    return state, progress, out, busy


def _room_for_steps(
    table: KVState, rows: Int[Array, "rows"], left: Int[Array, "rows"], num_steps: Int[Array, ""]
) -> tuple[KVState, Int[Array, "rows"], Int[Array, ""]]:
    """Reserves pages for up to num_steps steps of all rows, or for one of those that it can serve.

    On one device, where each step reserves its own, no row would want a page in vain in these.

    Args:
      left: steps that each row can do.

    Returns:
      (table, reasons as of `make_room`, steps).
    """

    def is_too_much(steps):
        _, status = table.reserve(rows, jnp.minimum(left, steps))
        return (steps > 1) & jnp.any(status != int(Status.OK))

    steps = jax.lax.while_loop(is_too_much, lambda steps: steps // 2, num_steps)
    return *make_room(table, rows, jnp.minimum(left, steps)), steps


class _Carry(NamedTuple):
    """Between two ticks of a stage."""

    tick: jax.Array
    end: jax.Array  # the tick before which the loop ends, as far as this stage knows
    x: jax.Array  # [rows of a micro-batch, hidden], from the stage before
    tokens: jax.Array  # i32[rows of a micro-batch], -1 for one that does not run
    state: KVState
    waiting: jax.Array  # i32[micro-batches, rows of each], on the first stage: the tokens to feed
    progress: Progress  # on the last stage
    out: jax.Array  # on the last stage
    worked: jax.Array  # ticks


def _around(
    graph: Graph, count: int, chunk: int, params: Any, state: KVState, progress: Progress,
    rows: jax.Array, limits: jax.Array, stop_tokens: jax.Array, sampler: Sampler,
    num_steps: jax.Array,
) -> tuple[KVState, Progress, jax.Array, Busy]:  # fmt: skip
    """The loop of one device of a stage; count: micro-batches."""
    model: Any = merge_model(graph, params)
    pp, stage = jax.lax.axis_size(PP), jax.lax.axis_index(PP).astype(jnp.int32)
    is_first, is_last = stage == 0, stage == pp - 1
    running = progress.reasons == int(Reason.RUNNING)
    groups = _spread(running, count)
    events = jnp.where(jnp.any(running), num_steps * count, 0)

    def tick(carry: _Carry) -> _Carry:
        event, came = carry.tick - stage, carry.tick - pp
        group, number = event % count, event // count
        index = groups[group]
        waiting = carry.waiting.at[came % count].set(
            jnp.where(came >= 0, carry.tokens, carry.waiting[came % count])
        )
        tokens = jnp.where(is_first, waiting[group], carry.tokens)
        tokens = jnp.where((event >= 0) & (event < events), tokens, -1)
        x = jax.lax.cond(
            is_first, lambda: model.embed(jnp.maximum(tokens, 0)), lambda: carry.x
        )  # fmt: skip
        runs = tokens >= 0
        state, batch, _ = carry.state.step(jnp.where(runs, rows[index], -1), 1)
        x, state = model.run_layers(x, batch, state)

        def draw():
            own = jax.tree.map(lambda x: x[index], carry.progress)
            new = sampler(model.logits(x), index, own.made)
            own, kept = own.after(new, runs, limits[index], stop_tokens)
            place = jnp.where(runs, index, len(rows))
            progress = jax.tree.map(
                lambda x, y: x.at[place].set(y, mode="drop"), carry.progress, own
            )
            out = carry.out.at[place, number].set(jnp.where(kept, new, -1), mode="drop")
            goes_on = runs & (own.reasons == int(Reason.RUNNING))
            # If no row runs, all stages know it pp − 1 ticks later.
            more = jnp.any(progress.reasons == int(Reason.RUNNING))
            end = jnp.where(more, carry.end, jnp.minimum(carry.end, carry.tick + pp - 1))
            return jnp.where(goes_on, new, -1), progress, out, end

        drawn, progress, out, end = jax.lax.cond(
            is_last, draw, lambda: (tokens, carry.progress, carry.out, carry.end)
        )
        x, tokens, told = _passed_on(x, drawn, end, pp)
        worked = carry.worked + jnp.any(runs).astype(jnp.int32)
        return _Carry(
            carry.tick + 1, jnp.minimum(end, told), x, tokens, state, waiting, progress, out, worked
        )

    size = groups.shape[1]
    nothing = jnp.zeros((size, model.config.hidden_size), model.dtype)
    waiting = jnp.where((groups >= 0) & running[groups], progress.last[groups], -1)
    carry = _Carry(
        jnp.int32(0), events + pp - 1, nothing, jnp.full(size, -1, jnp.int32), state, waiting,
        progress, jnp.full((len(rows), chunk), -1, jnp.int32), jnp.int32(0),
    )  # fmt: skip
    carry = jax.lax.while_loop(lambda carry: carry.tick < carry.end, tick, carry)
    told = jax.tree.map(
        lambda x: jnp.where(is_last, x, jnp.zeros_like(x)), (carry.progress, carry.out)
    )
    worked = jnp.zeros(pp, jnp.int32).at[stage].set(carry.worked)
    (progress, out), worked = jax.lax.psum((told, worked), PP)
    return carry.state, progress, out, Busy(carry.tick, worked)


def _spread(running: Bool[Array, "rows"], count: int) -> Int[Array, "count size"]:
    """Which rows are in which micro-batch, -1 = none: those that run are spread evenly."""
    order = jnp.argsort(~running, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -len(order) % count), constant_values=-1)
    return order.reshape(-1, count).T


def _passed_on(
    x: jax.Array, tokens: jax.Array, end: jax.Array, pp: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the stage before has: x, tokens and end; of the first stage, the last one."""
    words: Any = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    numbers = jnp.stack([tokens, jnp.full_like(tokens, end)], axis=1)
    as_words = jax.lax.bitcast_convert_type(numbers, words).reshape(len(x), -1)
    message = jnp.concatenate([jax.lax.bitcast_convert_type(x, words), as_words], axis=1)
    message = jax.lax.ppermute(message, PP, [(i, (i + 1) % pp) for i in range(pp)])
    as_words = message[:, x.shape[1] :].reshape(len(x), 2, -1)
    if x.dtype.itemsize == 4:
        as_words = as_words[..., 0]
    numbers = jax.lax.bitcast_convert_type(as_words, jnp.int32)
    x = jax.lax.bitcast_convert_type(message[:, : x.shape[1]], x.dtype)
    return x, numbers[:, 0], numbers[0, 1]
