# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of the engine: one step of mixed prefill and decode, and page keeping.

Both work on all rows of the state at once, in fixed shapes, and neither waits for the host: what a
step needs of the step before it (the last tokens, the page ids of cache entries) stays on the
device. The host plans with page *counts*, which it knows without asking; should it ever be wrong,
a verb reports it or a row's length tells it, and `failed` makes that step and every later one say
so instead of a token.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.state import KVState
from jax_paged.cache.table import PageCopies
from jax_paged.cache.trees import NO_TREE

from ..decoder.partition import DP
from ..decoder.protocol import Graph, run_model
from ..decoder.sample import RowSamplers, log_softmax_at
from .groups import counted, truncate
from .logit_edits import LogitEdits, TokenMemory, ways
from .speculate import propose, reject, walk_tree

_MOST_COPIES = 8  # of one `keep`: XLA:GPU reads as many pages where there are fewer
FAILED = -2  # in place of a token: a verb refused what the host had planned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """What lives on the device between steps."""

    state: KVState
    last: jax.Array  # i32[max_seqs], the token that each row drew last
    entry_pages: jax.Array  # i32[num_pages], the page of each cache entry
    failed: jax.Array  # bool[]
    memory: TokenMemory
    drafter: KVState | None = None  # a draft model's pages, under the page ids of the same table
    # i32[num_layers, num_experts], tokens that experts have had; None where they cannot move.
    loads: jax.Array | None = None

    @staticmethod
    def create(
        state: KVState, vocab_size: int, drafter: KVState | None = None,
        experts: tuple[int, int] | None = None,
    ) -> "EngineState":  # fmt: skip
        """Takes empty states over; of the draft model's only the pages.

        experts: the shape of the loads of experts that can move.
        """
        if drafter is not None:
            drafter = drafter.replace(table=None)
        return EngineState(
            drafter=drafter,
            state=state,
            last=jnp.zeros(state.max_seqs, jnp.int32),
            entry_pages=jnp.full(counted(state).table.num_pages, -1, jnp.int32),
            failed=jnp.zeros((), jnp.bool_),
            memory=TokenMemory.create(state.max_seqs, vocab_size),
            loads=None if experts is None else jnp.zeros(experts, jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageOrders:
    """What happens to rows and pages before a step, in this order; -1 takes no part."""

    hold_rows: np.ndarray  # i32[H]: page hold_columns of hold_rows goes into hold_entries
    hold_columns: np.ndarray  # i32[H]
    hold_entries: np.ndarray  # i32[H]
    release_rows: np.ndarray  # i32[max_seqs]
    evict_entries: np.ndarray  # i32[H]
    adopt_rows: np.ndarray  # i32[max_seqs], rows that start
    adopt_entries: np.ndarray  # i32[max_seqs, pages_per_seq], what they start with
    adopt_tokens: np.ndarray  # i32[max_seqs], room that they reserve beyond it
    had_tokens: np.ndarray  # i32[max_seqs], tokens there that come from host memory or are copied
    slid_pages: np.ndarray  # i32[max_seqs], pages behind the pinned tokens' that have slid away
    copy_rows: np.ndarray  # i32[C]: page copy_columns of copy_rows becomes that of copy_entries
    copy_columns: np.ndarray  # i32[C]
    copy_entries: np.ndarray  # i32[C]

    @staticmethod
    def create(table: PageTable, size: int) -> "PageOrders":
        """One that does nothing, for up to `size` = H holds and evictions, and C copies."""
        rows, columns = table.page_table.shape
        copies = np.full(min(rows, _MOST_COPIES), -1, np.int32)
        none, per_row = np.full(size, -1, np.int32), np.full(rows, -1, np.int32)
        return PageOrders(
            hold_rows=none,
            hold_columns=none.copy(),
            hold_entries=none.copy(),
            release_rows=per_row,
            evict_entries=none.copy(),
            adopt_rows=per_row.copy(),
            adopt_entries=np.full((rows, columns), -1, np.int32),
            adopt_tokens=np.zeros(rows, np.int32),
            had_tokens=np.zeros(rows, np.int32),
            slid_pages=np.zeros(rows, np.int32),
            copy_rows=copies,
            copy_columns=copies.copy(),
            copy_entries=copies.copy(),
        )

    def packed(self) -> "PackedOrders":
        """The same as one array."""
        return PackedOrders(_words_of(self), len(self.hold_rows))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedOrders:
    """`PageOrders` as the host hands them over: a mesh takes time to place each array."""

    words: Any  # i32[n]
    size: int = dataclasses.field(metadata={"static": True})  # of `PageOrders.create`

    def orders(self, table: PageTable) -> PageOrders:
        """The orders, inside of a program."""
        return _of_words(self.words, PageOrders.create(table, self.size))


def _words_of(tree: Any) -> np.ndarray:
    """Small arrays of 32 bits, and of booleans, one after another: i32[n]."""
    leaves = [x.ravel() for x in jax.tree.leaves(tree)]
    words = [x.astype(np.int32) if x.dtype == np.bool_ else x.view(np.int32) for x in leaves]
    return np.concatenate(words)


def _of_words(words: jax.Array, like: Any) -> Any:
    """The arrays of `_words_of`, with the shapes and dtypes of `like`."""
    likes, tree = jax.tree.flatten(like)
    parts = jnp.split(jnp.asarray(words), np.cumsum([x.size for x in likes])[:-1])

    def leaf(part, x):
        is_bool = x.dtype == np.bool_
        values = part != 0 if is_bool else jax.lax.bitcast_convert_type(part, x.dtype)
        return values.reshape(x.shape)

    return jax.tree.unflatten(tree, map(leaf, parts, likes))


@functools.partial(jax.jit, donate_argnames="device", static_argnames="window")
def keep(
    device: EngineState, packed: PackedOrders, *, window: tuple[int, int] | None = None
) -> EngineState:
    """Carries out orders. Rows that start get the window, of so many tokens and pinned ones.

    Where the layers of the counted group have that window, its rows have it already.
    """
    own, entry_pages = counted(device.state), device.entry_pages
    table = own.table
    orders = packed.orders(table)
    size = entry_pages.shape[0]

    def pages_of(entries):
        return jnp.where(entries >= 0, entry_pages[jnp.maximum(entries, 0)], -1)

    table, held, status = table.hold(orders.hold_rows, orders.hold_columns)
    statuses = [status]
    entries = jnp.where(orders.hold_entries >= 0, orders.hold_entries, size)
    entry_pages = entry_pages.at[entries].set(held, mode="drop")
    table, status = table.release(orders.release_rows)
    statuses.append(status)
    table, status = table.unhold(pages_of(orders.evict_entries))
    statuses.append(status)
    table, status = table.adopt(orders.adopt_rows, pages_of(orders.adopt_entries))
    statuses.append(status)
    table, status = table.reserve(orders.adopt_rows, orders.adopt_tokens)
    statuses.append(status)
    if window is not None and not table.row_window:
        table, status = table.set_window(orders.adopt_rows, *window)
        statuses.append(status)
    starting = jnp.where(orders.adopt_rows >= 0, orders.adopt_rows, table.max_seqs)
    slid = orders.slid_pages * table.page_size
    more = orders.had_tokens + slid
    table = dataclasses.replace(table, seq_lens=table.seq_lens.at[starting].add(more, mode="drop"))
    if window is not None and table.windows is not None:
        offset = table.windows.slot_offset.at[starting].set(slid, mode="drop")
        table = dataclasses.replace(
            table, windows=dataclasses.replace(table.windows, slot_offset=offset)
        )
    statuses.append(jnp.where(orders.had_tokens > orders.adopt_tokens, jnp.int32(1), 0))
    page = table.page_table[orders.copy_rows, orders.copy_columns]
    copies = PageCopies(pages_of(orders.copy_entries), jnp.where(orders.copy_rows >= 0, page, -1))
    drafter = device.drafter
    if drafter is not None:
        drafter = drafter.with_copies(None, copies)
    groups = []
    for group in device.state.groups:
        if group is own:
            groups.append(group.with_copies(table, copies))
        else:  # rows begin without pages, and get them chunk by chunk
            other, released = group.table.release(orders.release_rows)
            other, status = other.reserve(orders.adopt_rows, 0)
            statuses += [released, status]
            groups.append(dataclasses.replace(group, table=other))
    return dataclasses.replace(
        device,
        state=dataclasses.replace(device.state, groups=tuple(groups)),
        drafter=drafter,
        entry_pages=entry_pages,
        failed=device.failed | jnp.any(jnp.concatenate(statuses) != 0),
    )


@functools.partial(jax.jit, donate_argnames="device")
def remember(device: EngineState, row: jax.Array, seen: jax.Array, bias: jax.Array) -> EngineState:
    """A request that edits logits starts in a row (`TokenMemory.begin`)."""
    return dataclasses.replace(device, memory=device.memory.begin(row, seen, bias))


@functools.partial(jax.jit, donate_argnames="device")
def take_loads(device: EngineState) -> tuple[EngineState, jax.Array]:
    """(device, whose counters begin anew, the loads of all replicas). Inside of `over_replicas`."""
    assert device.loads is not None
    loads = jax.lax.psum(device.loads.astype(jnp.float32), DP)
    return dataclasses.replace(device, loads=jnp.zeros_like(device.loads)), loads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step feeds, row after row in the order of their numbers, and what it draws."""

    tokens: np.ndarray  # i32[T], flat, then padding
    q_lens: np.ndarray  # i32[max_seqs], tokens of each row, drafts included
    lengths: np.ndarray  # i32[max_seqs], what a row that feeds has before the step: a check
    feeds_last: np.ndarray  # bool[max_seqs]: the row's first token is the one that it drew last
    draws: np.ndarray  # bool[max_seqs]: the row draws a token behind its last one
    num_drafts: np.ndarray  # i32[max_seqs], how many of its tokens are guesses, at its end
    parents: np.ndarray  # i32[T], of the nodes of draft trees (`step`), else NO_TREE
    made: np.ndarray  # i32[max_seqs], new tokens so far: the position of the draw
    targets: np.ndarray  # i32[T], the token behind each whose probability is asked for, else -1
    samplers: RowSamplers
    edits: LogitEdits

    @staticmethod
    def create(max_seqs: int, num_tokens: int, mask: Any) -> "StepPlan":
        """One that feeds nothing, for up to T = num_tokens tokens; mask: of `LogitEdits`."""
        zeros = np.zeros(max_seqs, np.int32)
        return StepPlan(
            tokens=np.zeros(num_tokens, np.int32),
            q_lens=zeros,
            lengths=zeros.copy(),
            feeds_last=np.zeros(max_seqs, np.bool_),
            draws=np.zeros(max_seqs, np.bool_),
            num_drafts=zeros.copy(),
            parents=np.full(num_tokens, NO_TREE, np.int32),
            made=zeros.copy(),
            targets=np.full(num_tokens, -1, np.int32),
            samplers=RowSamplers.create(max_seqs),
            edits=LogitEdits.create(max_seqs, mask),
        )

    def packed(self) -> "PackedPlan":
        """The same as few arrays."""
        words = _words_of(_with_mask(self, None))
        return PackedPlan(words, self.edits.mask, len(self.q_lens), len(self.tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A `StepPlan` as the host hands it over, as `PackedOrders` are."""

    words: Any  # i32[n]: all but the mask
    mask: Any  # of `LogitEdits`
    max_seqs: int = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})

    def plan(self) -> StepPlan:
        """The plan, inside of a program."""
        like = StepPlan.create(self.max_seqs, self.num_tokens, None)
        return _with_mask(_of_words(self.words, like), self.mask)


def _with_mask(plan: StepPlan, mask: Any) -> StepPlan:
    return dataclasses.replace(plan, edits=dataclasses.replace(plan.edits, mask=mask))


class LogProbabilities(NamedTuple):
    """Of the new tokens of a step, in the order in which each row gets them."""

    model: jax.Array  # f32[max_seqs, max_drafts + 1], under the model's own distribution
    drawn: jax.Array  # the same, under the distribution that was drawn from
    top_tokens: jax.Array  # i32[max_seqs, max_drafts + 1, count], the likeliest in their place
    top: jax.Array  # f32, the same, under the model's own distribution


class Drawn(NamedTuple):
    """What the host reads back of a step."""

    tokens: jax.Array  # i32[max_seqs, max_drafts + 1]: the new ones of each row, then -1
    logprobs: LogProbabilities | None
    prompt: LogProbabilities | None  # of StepPlan.targets: [T] in place of [max_seqs, …]


@functools.partial(
    jax.jit, donate_argnames="device",
    static_argnames=(
        "graph", "max_drafts", "drafter", "rule", "branches", "logprobs", "scores", "cascade"
    ),
)  # fmt: skip
def step(
    graph: Graph, params: Any, device: EngineState, packed: PackedPlan,
    drafter_params: Any = None, *,
    max_drafts: int, drafter: Graph = None, rule: str = "same_noise", branches: int = 1,
    logprobs: int | None = None, scores: bool = False, cascade: bool = False,
) -> tuple[EngineState, Drawn]:  # fmt: skip
    """Feeds the tokens of a plan to the model and draws the next ones.

    A row with drafts draws at the token before them and at each of them. With "same_noise" it keeps
    its draws up to the first that differs from the draft behind it: a draw never depends on the
    drafts, so the tokens are those that a row without drafts gets. "rejection" is
    `speculate.reject`. The drafts that are not kept are cut off again.

    Args:
      drafter, drafter_params: a draft model, which makes the drafts (the plan then has their number
        only) and is fed all that the model is fed; None = the drafts are in the plan.
      branches: with more than 1, drafts are the nodes of trees, of which the row's last token is
        the root, and a way through the tree is kept.
      logprobs: how many likeliest tokens to tell beside the log-probabilities of the new ones;
        None = no log-probabilities.
      scores: whether the log-probabilities of the plan's targets are told, too: this program then
        computes the logits of all tokens.
      cascade: as for `Engine`.

    Returns:
      (device, what was drawn); its tokens are all FAILED if the host's plan did not hold.
    """
    state, plan, trees = device.state, packed.plan(), branches > 1
    num_rows, size = device.last.shape[0], plan.tokens.shape[0]
    rows = jnp.where(plan.q_lens > 0, jnp.arange(num_rows, dtype=jnp.int32), -1)
    as_planned = (rows == -1) | (state.groups[0].table.seq_lens == plan.lengths)
    state, reserved = state.reserve(rows, plan.q_lens)
    roomy = state
    state, batch, stepped = state.step(
        rows, plan.q_lens, num_tokens=size, tree_parents=plan.parents if trees else None,
        cascade=cascade,
    )  # fmt: skip
    statuses = [reserved, stepped]
    first = jnp.where(plan.feeds_last, batch.cu_q_lens[:-1], size)
    tokens = jnp.asarray(plan.tokens).at[first].set(device.last, mode="drop")

    column = jnp.arange(max_drafts + 1, dtype=jnp.int32)[None, :]
    number = (batch.cu_q_lens[1:] - 1 - plan.num_drafts)[:, None] + column
    number = jnp.clip(number, 0, size - 1)  # flat, of the tokens whose successors are drawn
    is_node = column <= plan.num_drafts[:, None]
    is_draft = is_node[:, 1:]
    num_drafts, made = jnp.asarray(plan.num_drafts), jnp.asarray(plan.made)
    pool, drafts, refused = device.drafter, None, jnp.zeros((), jnp.bool_)
    if pool is not None:
        pool, drafts, refused = propose(
            drafter, drafter_params, pool.replace(table=roomy.table), tokens[number[:, 0]],
            num_drafts, made, plan.samplers, max_drafts=max_drafts, branches=branches, rule=rule,
        )  # fmt: skip
        at = jnp.where(is_draft, number[:, 1:], size)
        tokens = tokens.at[at].set(drafts.tokens, mode="drop")
        nothing = jnp.zeros(1, jnp.int32)
        _, pool = run_model(drafter, drafter_params, tokens, batch, pool, logit_rows=nothing)

    draws_here = plan.draws[:, None] & is_node
    wanted = None if scores else jnp.where(draws_here, number, -1).ravel()
    counting = {} if device.loads is None else {"loads": device.loads}
    logits, state, *loads = run_model(
        graph, params, tokens, batch, state, logit_rows=wanted, **counting
    )
    of_prompt = None
    if scores:
        of_prompt = _scores(logits, jnp.asarray(plan.targets), logprobs or 0)
        logits = logits[number.ravel()]
    own_logits = logits
    nodes = jnp.where(is_node, tokens[number], -1)
    tree = jnp.asarray(plan.parents)[number] if trees else None
    logits, stuck = plan.edits(logits, device.memory, ways(nodes, tree))
    samplers = jax.tree.map(lambda x: jnp.repeat(x, max_drafts + 1), plan.samplers)
    depth = batch.positions[number] - batch.positions[number[:, :1]] if trees else column
    drawn = samplers(logits, (made[:, None] + depth).ravel()).reshape(number.shape)
    if drafts is not None and rule == "rejection":
        p = samplers.probabilities(logits).reshape(*number.shape, -1)
        leaf, drawn, kept = reject(
            p, drawn, drafts, num_drafts, made, plan.samplers, branches=branches
        )
    elif trees:
        parents = jnp.asarray(plan.parents)[number]
        leaf, drawn, kept = walk_tree(drawn, tokens[number], parents, num_drafts + 1)
    else:
        agrees = (drawn[:, :-1] == tokens[number[:, 1:]]) & is_draft
        kept = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        leaf = kept

    if trees:
        grown = jnp.where(num_drafts > 0, rows, -1)
        if pool is not None:  # moved as the model's are
            pool, _ = pool.replace(table=state.table).commit_tree(grown, leaf)
        state, status = state.commit_tree(grown, leaf)
        statuses.append(status)
        state, status = truncate(state, grown, 0)  # pages that it needs no more
        statuses.append(status)
    elif max_drafts > 0:
        wrong = plan.num_drafts - kept
        # The pages of drafts are the row's own.
        state, status = truncate(state, jnp.where(wrong > 0, rows, -1), wrong)
        statuses.append(status)
    told = None
    if logprobs is not None:
        places = jnp.broadcast_to(column, number.shape)
        if trees:
            parents = jnp.asarray(plan.parents)[number]
            places = _way_to(leaf, jnp.clip(parents, 0, max_drafts), depth)
        told = _log_probabilities(own_logits, logits, samplers, places, drawn, logprobs)
    failed = device.failed | jnp.any(jnp.stack(statuses) != 0) | ~jnp.all(as_planned) | refused
    draws = plan.draws & ~stuck.reshape(number.shape)[:, 0]
    new = jnp.where((column <= kept[:, None]) & draws[:, None], drawn, -1)
    counts = plan.edits.active & draws
    newest = jnp.take_along_axis(drawn, kept[:, None], axis=1)[:, 0]
    device = dataclasses.replace(
        device,
        state=state,
        last=jnp.where(plan.draws, newest, device.last),
        failed=failed,
        memory=device.memory.add(new, counts),
        drafter=None if pool is None else pool.replace(table=None),
        loads=_not_too_large(loads[0]) if loads else None,
    )
    return device, Drawn(jnp.where(failed, jnp.int32(FAILED), new), told, of_prompt)


def _not_too_large(loads: jax.Array) -> jax.Array:
    """Halves counters before one of them overflows."""
    return loads >> (jnp.max(loads) > 2**30).astype(jnp.int32)


def _way_to(leaf: jax.Array, parents: jax.Array, depth: jax.Array) -> jax.Array:
    """i32[rows, nodes]: the nodes on the way from node 0 to the leaf, then the leaf again."""
    rows = jnp.arange(leaf.shape[0], dtype=jnp.int32)
    way, node = jnp.broadcast_to(leaf[:, None], parents.shape), leaf
    for _ in range(parents.shape[1]):
        way = way.at[rows, depth[rows, node]].set(node, mode="drop")
        node = parents[rows, node]
    return way


def _log_probabilities(
    own_logits: jax.Array, logits: jax.Array, samplers: RowSamplers, places: jax.Array,
    new: jax.Array, count: int,
) -> LogProbabilities:  # fmt: skip
    """Those of tokens new[row, i], which stand behind the logits of places[row, i].

    Args:
      own_logits, logits: of the model, and as the requests have edited them.
    """
    rows, columns = new.shape
    if columns > 1:
        own = (jnp.arange(rows, dtype=jnp.int32)[:, None] * columns + places).ravel()
        samplers = jax.tree.map(lambda x: jnp.asarray(x)[own], samplers)
        own_logits, logits = own_logits[own], logits[own]
    tokens = jnp.maximum(new.ravel(), 0)
    drawn = samplers.log_probability(logits, tokens)
    scores = _scores(own_logits, tokens, count)._replace(drawn=drawn)
    return LogProbabilities(*(x.reshape(*new.shape, *x.shape[1:]) for x in scores))


def _scores(logits: jax.Array, tokens: jax.Array, count: int) -> LogProbabilities:
    """Of tokens[i] under logits[i], and of the likeliest in its place."""
    _, likeliest = jax.lax.top_k(logits, count)
    likeliest = likeliest.astype(jnp.int32)
    told = jnp.concatenate([jnp.maximum(tokens, 0)[:, None], likeliest], axis=1)
    values = log_softmax_at(logits, told)
    return LogProbabilities(values[:, 0], values[:, 0], likeliest, values[:, 1:])
