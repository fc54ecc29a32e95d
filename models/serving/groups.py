# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers with windows have pools of their own, which free what they no longer see.

The scheduler counts the pages of one group of layers: those that see all tokens, or if there are
none, those of the largest window. What a row has in another group are some of the pages that it
has there. So a pool as large as the counted one never runs out, nor does one with room for a window
and a chunk in every row; each of the others is the smaller of the two, and needs no count.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged.cache.pools import KVGroup
from jax_paged.cache.state import KVState, LayerKind
from jax_paged.checks import expect

from ..decoder.generation import PAGE_SIZE, model_kinds, state_creator
from ..decoder.protocol import Model
from .scheduler import window_pages


def counted_kind(kinds: Iterable[LayerKind]) -> LayerKind:
    """The kind of layers whose pages are counted: those that see most."""
    return max(kinds, key=lambda kind: kind if isinstance(kind, int) else math.inf)


def counted(state: KVState) -> KVGroup:
    """The group whose pages are counted."""
    return state.groups[state.kinds.index(counted_kind(state.kinds))]


def engine_state(
    model: Model, *, num_pages: int, max_seqs: int, pages_per_seq: int, max_tokens: int,
    groups: bool = False, page_size: int = PAGE_SIZE, **sizes: Any,
) -> Callable[[], KVState]:  # fmt: skip
    """What creates the state of an engine, as `state_creator` does.

    Args:
      num_pages, pages_per_seq: of the counted group.
      max_tokens: most tokens of a step.
    """
    pages: int | dict[LayerKind, int] = num_pages
    most: int | dict[LayerKind, int] = pages_per_seq
    if groups:
        kinds = set(model_kinds(model.config))
        pages, most = dict.fromkeys(kinds, num_pages), dict.fromkeys(kinds, pages_per_seq)
        for kind in kinds - {counted_kind(kinds)}:
            assert isinstance(kind, int)
            most[kind] = min(window_pages((kind, 0), max_tokens, page_size), pages_per_seq)
            pages[kind] = min(max_seqs * most[kind], num_pages)
    return state_creator(
        model, num_pages=pages, max_seqs=max_seqs, pages_per_seq=most, page_size=page_size,
        groups=groups, **sizes,
    )  # fmt: skip


def check_groups(
    model: Model, *, window: tuple[int, int] | None, draft_model: Model | None,
    prefix_cache: bool | None, preemption: str,
) -> tuple[tuple[int, int] | None, bool]:  # fmt: skip
    """(the scheduler's window, whether there is a prefix cache) of an engine with groups.

    Args:
      others: as the engine got them; window: that of requests.

    Raises:
      ValueError: one of them takes a state of one group, or one whose layers have no windows.
    """
    kinds = set(model_kinds(model.config))
    own, is_one = counted_kind(kinds), len(kinds) == 1
    if not is_one or isinstance(own, int):
        text = "None where groups of layers have windows"
        expect(window is None, "window", text, window)
        expect(draft_model is None, "draft_model", text, type(draft_model).__name__)
    text = f"with groups of the kinds {sorted(kinds, key=str)}"
    expect(is_one or not prefix_cache, "prefix_cache", f"None or False {text}", prefix_cache)
    can = is_one or preemption == "recompute"
    expect(can, "preemption", f"'recompute' {text}", repr(preemption))
    has_cache = is_one if prefix_cache is None else bool(prefix_cache)
    return (own, 0) if isinstance(own, int) else window, has_cache


def truncate(state: KVState, rows: jax.Array, counts: Any) -> tuple[KVState, jax.Array]:
    """Drops the last tokens of rows whose last pages are their own: there is nothing to copy."""
    groups, statuses = [], []
    for group in state.groups:
        table, _, status = group.table.truncate(rows, counts)
        groups.append(dataclasses.replace(group, table=table))
        statuses.append(status)
    return dataclasses.replace(state, groups=tuple(groups)), jnp.max(jnp.stack(statuses), axis=0)
