# SPDX-License-Identifier: Apache-2.0
"""What /metrics tells, for Prometheus."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from ..serving.engine import Engine

_FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "running": ("Requests that have a row.", lambda engine: engine.num_running),
    "waiting": ("Requests that wait for a row and pages.", lambda engine: engine.num_waiting),
    "pages": ("Pages of the pool.", lambda engine: engine.num_pages),
    "free_pages": (
        "Pages that neither a request nor the cache has.", lambda engine: engine.num_free_pages
    ),
    "cache_hit_rate": (
        "Share of prompt tokens that were found in the prefix cache.",
        lambda engine: engine.cache_counts.hit_rate,
    ),
    "preemptions": (
        "Times that a request had to make room.", lambda engine: engine.num_preemptions
    ),
    "steps": ("Steps of the engine.", lambda engine: engine.num_steps),
    "fed_tokens": ("Tokens that went through the model.", lambda engine: engine.num_fed),
}  # fmt: skip


class Metrics:
    """Counters, times and gauges of one server, all under `jax_paged_`."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self._engine = engine
        made: dict[str, Any] = {"registry": self.registry}
        self.first_token = Histogram(
            "jax_paged_first_token_seconds", "From the request to its first token.",
            buckets=_FIRST, **made,
        )  # fmt: skip
        self.inter_token = Histogram(
            "jax_paged_inter_token_seconds", "From one token of an answer to the next.",
            buckets=_BETWEEN, **made,
        )  # fmt: skip
        self.prompt_tokens = Counter("jax_paged_prompt_tokens", "Tokens of prompts.", **made)
        self.new_tokens = Counter("jax_paged_new_tokens", "New tokens.", **made)
        self.requests = Counter(
            "jax_paged_requests", "Requests, by their end.", ["endpoint", "outcome"], **made
        )
        self.registry.register(self)  # type: ignore[arg-type]
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterable[Any]:
        """The engine's own counters, as they are now."""
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"jax_paged_{name}", text, value=value(self._engine))

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        return generate_latest(self.registry)
