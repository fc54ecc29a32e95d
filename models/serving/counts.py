# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of itself: its counters, its weights and its pages."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from jax_paged.cache.state import KVState

from .prefix_cache import CacheCounts
from .runner import ModelRunner
from .scheduler import Scheduler


class EngineCounts:
    """Those of all replicas together, for the `Engine` that is made of them."""

    _runner: ModelRunner
    _schedulers: Sequence[Scheduler]

    @property
    def num_replicas(self) -> int:
        """Those of the model's mesh, 1 without one; each has rows, pages and a cache of its own."""
        return self._runner.num_replicas

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row and pages."""
        return sum(len(one.waiting) for one in self._schedulers)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return sum(len(one.running) for one in self._schedulers)

    @property
    def num_preemptions(self) -> int:
        """Times that a running request had to make room."""
        return sum(one.num_preemptions for one in self._schedulers)

    @property
    def num_swaps(self) -> tuple[int, int]:
        """Times that a request was copied to host memory, and back; the rest was recomputed."""
        out = sum(one.num_swapped_out for one in self._schedulers)
        return out, sum(one.num_swapped_in for one in self._schedulers)

    @property
    def num_free_swap_pages(self) -> int:
        """Pages of host memory that no preempted request has."""
        return sum(one.num_free_swap for one in self._schedulers)

    @property
    def num_free_pages(self) -> int:
        """Pages that neither a request nor the cache has."""
        return sum(one.num_free for one in self._schedulers)

    @property
    def cache_counts(self) -> CacheCounts:
        """Counters of the prefix caches; all 0 without one."""
        counts = [one.cache.counts for one in self._schedulers if one.cache is not None]
        return CacheCounts(*(sum(values) for values in zip(*map(astuple, counts), strict=True)))

    @property
    def num_pages(self) -> int:
        """Pages of the pools."""
        return self._runner.table.num_pages * self.num_replicas

    @property
    def params(self) -> Any:
        """The weights, as `split_model` gives them."""
        return self._runner.params

    @property
    def state(self) -> KVState:
        """The pages and their table after the steps so far; good until the next step takes it.

        With a mesh it is that of all replicas (`KVState.specs`).
        """
        return self._runner.device.state
