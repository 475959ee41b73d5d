"""What the server counts, for Prometheus (https://prometheus.io). Names end as vLLM's do, so its dashboards fit.

Sources: https://docs.vllm.ai/en/stable/design/metrics/ for the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.rows import Event

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server; every one has the label `model_name`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}

        def made(kind: type[Kind], name: str, text: str, *labels: str, **more: Any) -> Kind:
            return kind(f"quern:{name}", text, ("model_name", *labels), registry=self._registry, **more)

        self.running = made(Gauge, "num_requests_running", "Replies in the running batch.")
        self.waiting = made(Gauge, "num_requests_waiting", "Replies that wait for a seat.")
        self.usage = made(Gauge, "kv_cache_usage_perc", "Share of the seats that are taken.")
        self.queries = made(Gauge, "prefix_cache_queries", "Prompt tokens that were looked up.")
        self.hits = made(Gauge, "prefix_cache_hits", "Prompt tokens that were not read again.")
        self.prompt = made(Counter, "prompt_tokens", "Prompt tokens of finished requests.")
        self.generated = made(Counter, "generation_tokens", "Tokens of finished replies.")
        self.success = made(Counter, "request_success", "Finished replies.", "finished_reason")
        self.first = made(
            Histogram, "time_to_first_token_seconds", "From the request to its first piece.", buckets=LATENCIES
        )
        self.between = made(
            Histogram, "inter_token_latency_seconds", "From a piece of a reply to the next.", buckets=LATENCIES
        )
        self.whole = made(Histogram, "e2e_request_latency_seconds", "From the request to its end.", buckets=LATENCIES)

    def of(self, name: str, engine: Engine) -> ModelMetrics:
        """The counters of one model. They go on when its engine is replaced."""
        self._models[name] = ModelMetrics(self, name, engine)
        return self._models[name]

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        for name, model in self._models.items():
            prefixes = model.engine.prefixes
            self.queries.labels(name).set(0 if prefixes is None else prefixes.queried_tokens)
            self.hits.labels(name).set(0 if prefixes is None else prefixes.hit_tokens)
        return generate_latest(self._registry)


class ModelMetrics:
    """The counters of one model. engine: where sizes of the prefix cache are read from."""

    def __init__(self, all: Metrics, name: str, engine: Engine) -> None:
        self.engine, self._name, self._success = engine, name, all.success
        self._running, self._waiting, self._usage = (one.labels(name) for one in (all.running, all.waiting, all.usage))
        self._prompt, self._generated = all.prompt.labels(name), all.generated.labels(name)
        self._first, self._between, self._whole = (one.labels(name) for one in (all.first, all.between, all.whole))

    def set_load(self, running: int, waiting: int) -> None:
        """Takes down how many replies run and wait."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(running / self.engine.scheduler.max_rows)

    def observe(self, events: Sequence[Event], seconds: float, first: bool) -> None:
        """Counts what a request produced in one step, so long after its last piece, or after its arrival."""
        (self._first if first else self._between).observe(seconds)
        for event in events:
            if isinstance(event.value, Completion):
                self._generated.inc(len(event.value.ids))
                self._success.labels(self._name, event.value.finish_reason).inc()
                if event.sample == 0:
                    self._prompt.inc(event.value.prompt_tokens)

    def finish(self, seconds: float, cancelled: bool) -> None:
        """Counts a request that has ended or was cancelled, so long after its arrival."""
        self._whole.observe(seconds)
        if cancelled:
            self._success.labels(self._name, "abort").inc()
