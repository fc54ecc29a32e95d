# SPDX-License-Identifier: Apache-2.0
"""What the host has planned, as the arrays that the engine's programs take."""

from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from ..decoder.steps import chunk_size
from .scheduler import Feed, Orders
from .step import PageOrders, StepPlan
from .structured import Matcher


def step_sizes(decode_tokens: int, max_tokens: int) -> list[int]:
    """The compiled sizes: all rows decoding, then by factors of 4 (the last: 1.5 to 6) to all.

    Before them a quarter of the rows, if that is at least 8: for when little is to do.
    """
    sizes = [min(chunk_size(decode_tokens), max_tokens)]
    while sizes[-1] < max_tokens:
        larger = 4 * sizes[-1]
        sizes.append(larger if 3 * larger < 2 * max_tokens else max_tokens)
    return ([sizes[0] // 4] if sizes[0] >= 32 else []) + sizes


def page_orders(nothing: PageOrders, orders: Orders) -> Iterator[PageOrders]:
    """A scheduler's orders, in as many calls as they fill; none if there is nothing to do."""
    size = len(nothing.hold_rows)
    holds, evictions = orders.holds, orders.evictions
    releases, adoptions = orders.releases, orders.adoptions
    while len(holds) > size:
        yield _filled(nothing, holds[:size], [], [], [])
        holds = holds[size:]
    while len(evictions) > size:
        yield _filled(nothing, holds, releases, evictions[:size], [])
        holds, releases, evictions = [], [], evictions[size:]
    most = len(nothing.copy_rows)
    while holds or releases or evictions or adoptions:
        copied = [i for i, one in enumerate(adoptions) if one.source >= 0]
        count = copied[most] if len(copied) > most else len(adoptions)
        yield _filled(nothing, holds, releases, evictions, adoptions[:count])
        holds, releases, evictions, adoptions = [], [], [], adoptions[count:]


def _filled(nothing: PageOrders, holds, releases, evictions, adoptions) -> PageOrders:
    filled = jax.tree.map(np.copy, nothing)
    for i, (row, column, entry) in enumerate(holds):
        filled.hold_rows[i], filled.hold_columns[i] = row, column
        filled.hold_entries[i] = entry
    filled.release_rows[: len(releases)] = releases
    filled.evict_entries[: len(evictions)] = evictions
    num_copies = 0
    for i, (row, entries, room, had, slid, source) in enumerate(adoptions):
        filled.adopt_rows[i], filled.adopt_tokens[i] = row, room
        filled.had_tokens[i], filled.slid_pages[i] = had, slid
        filled.adopt_entries[i, : len(entries)] = entries
        if source >= 0:
            filled.copy_rows[num_copies], filled.copy_columns[num_copies] = row, len(entries)
            filled.copy_entries[num_copies] = source
            num_copies += 1
    return filled


def has_constraint(feed: Feed) -> bool:
    """Whether not all tokens are allowed in its draw."""
    return feed.draws and feed.request.matcher is not None


def fill_plan(feeds: list[Feed], max_seqs: int, size: int, mask: Any) -> StepPlan:
    """The feeds, in the order of their rows, as a step of `size` tokens takes them.

    Args:
      mask: that of `LogitEdits`, which allows all tokens; of constraints it is filled.
    """
    plan = StepPlan.create(max_seqs, size, mask)
    samplers, edits, end = plan.samplers, plan.edits, 0
    for feed in feeds:
        request, row = feed.request, feed.row
        known = request.known(request.fed, min(request.fed + feed.count, request.num_known))
        plan.feeds_last[row] = len(known) < feed.count
        ids = [*known, *[0] * (feed.count - len(known)), *feed.drafts]
        plan.tokens[end : end + len(ids)] = ids
        if feed.parents:  # node 0 is the token that exists
            nodes = [-1, *(parent + 1 for parent in feed.parents)]
            plan.parents[end : end + len(ids)] = nodes
        if request.is_told_of_prompt:
            behind = request.prompt[request.fed + 1 : request.fed + feed.count + 1]
            plan.targets[end : end + len(behind)] = behind
        end += len(ids)
        plan.q_lens[row], plan.num_drafts[row] = len(ids), len(feed.drafts)
        plan.lengths[row], plan.draws[row] = request.fed, feed.draws
        plan.made[row] = len(request.tokens) + request.in_flight
        sampling = request.sampling
        samplers.seed[row], samplers.draw_index[row] = sampling.seed, sampling.draw_index
        samplers.temperature[row] = sampling.temperature
        samplers.top_k[row] = sampling.top_k or 0
        samplers.top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
        samplers.min_p[row] = sampling.min_p or 0
        if feed.draws and (request.edits.is_active or request.matcher is not None):
            edits.active[row] = True
            edits.repetition[row] = request.edits.repetition
            edits.presence[row] = request.edits.presence
            edits.frequency[row] = request.edits.frequency
            if has_constraint(feed):
                cast(Matcher, request.matcher).allow(mask[row])
    return plan
