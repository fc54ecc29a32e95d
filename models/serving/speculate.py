# SPDX-License-Identifier: Apache-2.0
"""Drafts for speculative decoding: by n-gram look-up or a draft model, and which are kept.

Text often repeats itself: code, summaries, answers that quote the question. The tokens that
followed the present n-gram where it stood before are a guess that costs nothing (`look_up`; prompt
look-up decoding, Saxena, 2023). A smaller model guesses better, for its price (`propose`). The
engine feeds drafts together with the last token and keeps what its rule accepts. Several guesses
of what comes next make a tree (`look_up_tree`); the draws choose a way through it (`walk_tree`).

Two rules leave the distribution of the tokens as it is:

- "same_noise": the model draws at every place as it would without drafts; draws are kept up to the
  first that differs from the draft. So the tokens *are* those without drafts. A draft model draws
  with the noise that the model will use there, so that both tend to agree (drafter-invariant
  speculative decoding, Daliri et al., 2024). For a guess that is certain, which is what look-up
  makes, this is the rejection rule below with q = 1.
- "rejection": a draft d that was drawn from q is kept with probability min(1, p(d) / q(d)); the
  first that is not is replaced by a draw from what is left, max(p − q, 0) over its sum (Leviathan
  et al., Chen et al., 2023). For one guess no rule keeps more. In a tree the first tokens are drawn
  without replacement and tried in that order, each against what those before it have left of p
  (recursive rejection sampling, Jeon et al., 2024). Which tokens are drawn depends on where drafts
  begin.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_paged.cache.state import KVState
from jax_paged.cache.trees import NO_TREE

from ..decoder.likeliest import largest_in_order
from ..decoder.protocol import Graph, merge_model, run_model
from ..decoder.sample import RowSamplers, draw, with_noise

RULES = ("same_noise", "rejection")
LONGEST, SHORTEST = 3, 1  # n-grams that are looked up
_ACCEPT, _REPLACE, _DRAFT = 1, 2, 3  # folded into a place's key: independent noise for each


def look_up(tokens: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens that followed the last place where the end of `tokens` stood before.

    Longer ends go first: 3 tokens, then 2, then 1. Nothing is found if even the last token is new.

    >>> look_up([1, 2, 3, 9, 1, 2, 3], 2), look_up([1, 2, 3], 2), look_up([7, 7], 4)
    ([9, 1], [], [7])
    """
    text = np.asarray(tokens, np.int32)
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        places = np.flatnonzero((windows == text[-size:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            return text[start : start + most].tolist()
    return []


def look_up_tree(tokens: Sequence[int], most: int, branches: int) -> tuple[list[int], list[int]]:
    """What followed the last `branches` places where the end of `tokens` stood before, as a tree.

    Longer ends go first, then later places; each continuation has up to most / branches tokens, and
    beginnings that are alike are one.

    Returns:
      (tokens, parents) of up to `most` nodes, each behind its parent; -1 = a child of the end.

    >>> look_up_tree([1, 2, 5, 6, 1, 2, 5, 7, 1, 2], 6, 2)
    ([5, 7, 1, 6, 1], [-1, 0, 1, 0, 3])
    """
    text = np.asarray(tokens, np.int32)
    ids, parents, children, seen = [], [], {}, set()
    depth = -(-most // branches)
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        for place in np.flatnonzero((windows == text[-size:]).all(axis=1))[::-1].tolist():
            start, node = place + size, -1
            if start in seen or len(seen) == branches:
                continue
            seen.add(start)
            for token in text[start : start + depth].tolist():
                if (node, token) not in children:
                    if len(ids) == most:
                        break
                    children[node, token] = len(ids)
                    ids.append(token)
                    parents.append(node)
                node = children[node, token]
    return ids, parents


def draft_tree(
    max_drafts: int, branches: int
) -> tuple[Int[np.ndarray, "depth branches"], list[int]]:
    """The shape of the trees that a draft model proposes: chains from different first tokens.

    A node counts for 2^−(depth + rank) where rank is that of its first token, as if half of the
    guesses were right and the next likeliest token half as often; the first tokens and the best of
    the other nodes make the tree. So the branch of rank 0 is the longest. Nodes are numbered by
    depth, then rank: a forward of the draft model grows all branches, and the first few nodes are a
    tree as well, for rows with fewer drafts.

    Args:
      max_drafts: nodes of the tree.
      branches: 1 to max_drafts first tokens.

    Returns:
      (nodes, parents). nodes: i32, the number of the node at each depth and rank, max_drafts where
      there is none. parents: as in `look_up_tree`.

    >>> nodes, parents = draft_tree(6, 2)
    >>> nodes.tolist(), parents
    ([[0, 1], [2, 3], [4, 6], [5, 6]], [-1, -1, 0, 1, 2, 4])
    """
    lengths = [1] * branches
    for _ in range(max_drafts - branches):
        lengths[min(range(branches), key=lambda rank: lengths[rank] + rank)] += 1
    exists = np.arange(lengths[0])[:, None] < np.asarray(lengths)
    nodes = np.full(exists.shape, max_drafts, np.int32)
    nodes[exists] = np.arange(max_drafts)
    return nodes, [-1] * branches + nodes[:-1][exists[1:]].tolist()


class Drafts(NamedTuple):
    """What a draft model has proposed for each row, by the nodes of `draft_tree`.

    probabilities: what each was drawn from, with "rejection": the draft model's, for a first token
    without those of lower rank.
    """

    tokens: jax.Array  # i32[rows, max_drafts]
    probabilities: jax.Array | None  # f32[rows, max_drafts, vocab_size]


def propose(
    graph: Graph,
    params: Any,
    state: KVState,
    first: jax.Array,
    num_drafts: jax.Array,
    made: jax.Array,
    samplers: RowSamplers,
    *,
    max_drafts: int,
    branches: int,
    rule: str,
) -> tuple[KVState, Drafts, jax.Array]:
    """Continues each row by num_drafts[i] tokens of a draft model, behind the token first[i].

    They are the first nodes of `draft_tree`. The first token of rank 0 is the draw of the row, the
    others what the same noise would bring next, and each branch goes on as it is drawn. With
    "rejection" the noise is another than that of the draw.

    Args:
      graph, params: the draft model.
      state: its pages and the rows, which have room for the tokens; the table that comes back is
        this one: rows are as long as before.
      made: i32[rows], the position of the first draw.

    Returns:
      (state, drafts, bool[]: a verb refused).
    """
    model: Any = merge_model(graph, params)
    table, vocab_size = state.table, model.config.vocab_size
    rows = first.shape[0]
    size = rows * branches
    number = jnp.arange(rows, dtype=jnp.int32)
    rank = jnp.arange(branches, dtype=jnp.int32)[None]
    nodes = jnp.asarray(draft_tree(max_drafts, branches)[0])
    spread = jax.tree.map(lambda x: jnp.repeat(x, branches), samplers)
    rejects = rule == "rejection"

    def one(carry):
        """Feeds the nodes of a depth that have children, and draws these."""
        depth, state, tokens, above, drafts, failed = carry
        children = nodes[depth][None] < num_drafts[:, None]
        fed = jnp.where(depth == 0, children & (rank == 0), children)
        q_lens = jnp.sum(fed, axis=1, dtype=jnp.int32)
        parents, here = None, state.table.tree_sizes
        starts = jnp.cumsum(q_lens, dtype=jnp.int32) - q_lens
        at = jnp.where(fed, starts[:, None] + rank, size)
        if branches > 1:
            parents = above[:, None] + jnp.where(depth > 1, rank, 0)
            none = jnp.full(size, NO_TREE, jnp.int32)
            parents = none.at[at].set(parents, mode="drop")
        live = jnp.where(q_lens > 0, number, -1)
        state, batch, status = state.step(live, q_lens, num_tokens=size, tree_parents=parents)
        flat = jnp.zeros(size, jnp.int32).at[at].set(tokens, mode="drop")
        wanted = starts[:, None] + jnp.where(depth > 0, rank, 0)
        wanted = jnp.where(q_lens[:, None] > 0, wanted, -1)
        logits, state = run_model(graph, params, flat, batch, state, logit_rows=wanted.ravel())
        if branches > 1:
            new = jax.lax.cond(depth == 0, draw_first, draw_next, logits, depth)
        else:
            new = draw_next(logits, depth)
        drafts = jax.tree.map(lambda x, y: x.at[:, nodes[depth]].set(y, mode="drop"), drafts, new)
        return depth + 1, state, new.tokens, here, drafts, failed | jnp.any(status != 0)

    def draw_first(logits, _):
        logits = logits[::branches]
        if rejects:
            return _draw_first(_keys(samplers, made, _DRAFT), logits, samplers, branches)
        return Drafts(samplers.ranked(logits, made, branches), None)

    def draw_next(logits, depth):
        positions, given = jnp.repeat(made + depth, branches), None
        if rejects:
            given = spread.probabilities(logits)
            tokens = draw(_keys(spread, positions, _DRAFT), jnp.log(given))
            given = given.reshape(rows, branches, vocab_size)
        else:
            tokens = spread(logits, positions)
        return Drafts(tokens.reshape(rows, branches), given)

    most = jnp.max(num_drafts)
    if (partition := getattr(model, "partition", None)) is not None:
        most = partition.most_of_replicas(most)

    def goes_on(carry):
        depth = carry[0]
        return (depth < nodes.shape[0]) & (most > nodes[depth, 0])

    none = Drafts(
        jnp.zeros((rows, max_drafts), jnp.int32),
        jnp.zeros((rows, max_drafts, vocab_size), jnp.float32) if rejects else None,
    )
    tokens = jnp.broadcast_to(first[:, None], (rows, branches))
    above = jnp.full(rows, -1, jnp.int32)  # the first node of the depth above, in the row's tree
    start = (jnp.int32(0), state, tokens, above, none, jnp.zeros((), jnp.bool_))
    _, state, _, _, drafts, failed = jax.lax.while_loop(goes_on, one, start)
    return state.replace(table=table), drafts, failed


def _draw_first(keys: jax.Array, logits: jax.Array, samplers: RowSamplers, branches: int) -> Drafts:
    """First tokens, one after the other without those before; the likeliest where it is greedy."""
    q, chosen = samplers.probabilities(logits), []
    likeliest = largest_in_order(logits, branches)
    drawn = largest_in_order(with_noise(keys, jnp.log(q)), branches)
    greedy = jnp.asarray(samplers.temperature)[:, None] <= 0
    tokens = jnp.where(greedy, likeliest, drawn)
    for rank in range(branches):
        certain = jax.nn.one_hot(tokens[:, rank], q.shape[-1], dtype=jnp.float32)
        total = jnp.sum(q, axis=-1, keepdims=True)
        chosen.append(jnp.where(greedy, certain, q / jnp.where(total > 0, total, 1)))
        q = q * (1 - certain)
    return Drafts(tokens, jnp.stack(chosen, axis=1))


def reject(
    p: Float[Array, "rows columns vocab_size"],
    drawn: Int[Array, "rows columns"],
    drafts: Drafts,
    num_drafts: Int[Array, "rows"],
    made: Int[Array, "rows"],
    samplers: RowSamplers,
    *,
    branches: int = 1,
) -> tuple[Int[Array, "rows"], Int[Array, "rows columns"], Int[Array, "rows"]]:
    """The rejection rule, on chains or on the trees of `draft_tree`.

    In a tree the first tokens are tried in the order of their rank, each against what the ones
    before it have left of p, until one is kept.

    Args:
      p: what the model gives behind the row's last token and behind each draft, columns =
        max_drafts + 1.
      drawn: a draw from each, for where all drafts on the way are kept.
      made: the position of the first draw.

    Returns:
      As `walk_tree` does. (leaf i32[rows]: the column of the last draft that is kept, new
      i32[rows, columns]: the drafts on the way and the token behind them, then anything, kept
      i32[rows]: how many are kept.)
    """
    rows, columns, _ = p.shape
    nodes, _ = draft_tree(columns - 1, branches)
    row = jnp.arange(rows, dtype=jnp.int32)
    zeros = jnp.zeros(rows, jnp.int32)
    leaf, kept, branch, new = zeros, zeros, zeros, jnp.zeros((rows, columns), jnp.int32)
    left, goes_on, is_rest = p[:, 0], zeros == 0, zeros > 0
    q, tokens = drafts.probabilities, drafts.tokens
    assert q is not None
    for depth, here in enumerate(nodes):
        keys = _keys(samplers, made + depth, _ACCEPT)
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (branches,), jnp.float32))(keys)
        found = zeros > 0
        left = jnp.where((goes_on & (depth > 0))[:, None], p[row, leaf], left)
        for rank in range(branches if depth == 0 else 1):
            way = branch if depth else jnp.full_like(branch, rank)
            node = jnp.asarray(here)[way]
            tried = goes_on & ~found & (node < num_drafts)
            node = jnp.minimum(node, columns - 2)
            token, given = tokens[row, node], q[row, node]
            chance = given[row, token]
            # One that could not be drawn is none.
            take = tried & (chance > 0) & (uniform[row, way] * chance < left[row, token])
            rest = jnp.maximum(left - given, 0)
            total = jnp.sum(rest, axis=-1, keepdims=True)
            # Rounding may leave nothing of two that are equal; then what was there is as good.
            rest = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), left)
            left = jnp.where((tried & ~take)[:, None], rest, left)
            is_rest = (is_rest | tried) & ~take
            found, branch = found | take, jnp.where(take, way, branch)
            leaf = jnp.where(take, node + 1, leaf)
            new = new.at[:, depth].set(jnp.where(take, token, new[:, depth]))
        goes_on = found
        kept += found.astype(jnp.int32)
    instead = draw(_keys(samplers, made + kept, _REPLACE), jnp.log(left))
    behind = jnp.where(is_rest, instead, drawn[row, leaf])
    return leaf, new.at[row, kept].set(behind), kept


def walk_tree(
    drawn: Int[Array, "rows nodes"],
    tokens: Int[Array, "rows nodes"],
    parents: Int[Array, "rows nodes"],
    num_nodes: Int[Array, "rows"],
) -> tuple[Int[Array, "rows"], Int[Array, "rows nodes"], Int[Array, "rows"]]:
    """Follows the draws through trees of guesses, from node 0 on, as far as a child is the draw.

    Args:
      drawn: the draw behind each node. tokens, parents: of the nodes; those from num_nodes on are
        none, and node 0 is no guess.

    Returns:
      (leaf i32[rows]: the last node reached, new i32[rows, nodes]: the draws on the way, then
      anything, kept i32[rows]: how many guesses were right).
    """
    nodes = drawn.shape[1]
    number = jnp.arange(nodes, dtype=jnp.int32)[None]
    is_guess = (number > 0) & (number < num_nodes[:, None])

    def one(depth, carry):
        leaf, new, kept, goes_on = carry
        draw = jnp.take_along_axis(drawn, leaf[:, None], axis=1)
        new = new.at[:, depth].set(draw[:, 0])
        right = is_guess & (parents == leaf[:, None]) & (tokens == draw)
        goes_on &= jnp.any(right, axis=1)
        leaf = jnp.where(goes_on, jnp.argmax(right, axis=1).astype(jnp.int32), leaf)
        return leaf, new, kept + goes_on.astype(jnp.int32), goes_on

    zeros = jnp.zeros(drawn.shape[0], jnp.int32)
    start = (zeros, jnp.zeros_like(drawn), zeros, zeros == 0)
    leaf, new, kept, _ = jax.lax.fori_loop(jnp.int32(0), jnp.int32(nodes), one, start)
    return leaf, new, kept


def _keys(samplers: RowSamplers, positions: jax.Array, use: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, use))(samplers.keys(positions))
