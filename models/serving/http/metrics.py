"""Numbers for Prometheus: those of the engine, and times that clients see."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine
from ..request import Token

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _OfEngine(Collector):
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for name, value in self._engine.stats().items():
            text = name.replace("_", " ")
            if name.endswith("_total"):
                yield CounterMetricFamily(f"jtile_{name.removesuffix('_total')}", text, value=value)
            else:
                yield GaugeMetricFamily(f"jtile_{name}", text, value=value)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_OfEngine(engine))
        of = {"registry": self._registry}
        self._responses = Counter("jtile_http_responses", "responses by path and status", ("path", "status"), **of)
        self._first = Histogram("jtile_first_token_seconds", "until the first token", buckets=FIRST, **of)
        self._between = Histogram("jtile_between_tokens_seconds", "from token to token", buckets=BETWEEN, **of)

    def page(self) -> tuple[bytes, int, None, str]:
        """The page for Prometheus: content, status, headers, media type."""
        return generate_latest(self._registry), 200, None, CONTENT_TYPE_LATEST

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    async def timed(self, tokens: AsyncIterator[tuple[int, Token | None]]) -> AsyncIterator[tuple[int, Token | None]]:
        """Passes the tokens on, and notes the times between them."""
        last: dict[int, float] = {}
        start = time.perf_counter()
        async for i, token in tokens:
            now = time.perf_counter()
            if token is not None:
                (self._between if i in last else self._first).observe(now - last.get(i, start))
                last[i] = now
            yield i, token
