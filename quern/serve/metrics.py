"""What the server counts, for Prometheus (https://prometheus.io). Names end as vLLM's do, so its dashboards fit.

Sources: https://docs.vllm.ai/en/stable/design/metrics/ for the names.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.generate.scheduler import Event

LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server. engine: where sizes of the prefix cache are read from."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine

        def made(kind: type, name: str, text: str, *labels: str, **more: object) -> object:
            metric = kind(f"quern:{name}", text, ("model_name", *labels), registry=self.registry, **more)
            return metric if labels else metric.labels(model)

        self._model = model
        self._running: Gauge = made(Gauge, "num_requests_running", "Replies in the running batch.")  # type: ignore
        self._waiting: Gauge = made(Gauge, "num_requests_waiting", "Replies that wait for a seat.")  # type: ignore
        self._usage: Gauge = made(Gauge, "kv_cache_usage_perc", "Share of the seats that are taken.")  # type: ignore
        self._queries: Gauge = made(Gauge, "prefix_cache_queries", "Prompt tokens that were looked up.")  # type: ignore
        self._hits: Gauge = made(Gauge, "prefix_cache_hits", "Prompt tokens that were not read again.")  # type: ignore
        self._prompt: Counter = made(Counter, "prompt_tokens", "Prompt tokens of finished requests.")  # type: ignore
        self._generated: Counter = made(Counter, "generation_tokens", "Tokens of finished replies.")  # type: ignore
        self._success: Counter = made(  # type: ignore
            Counter, "request_success", "Finished replies.", "finished_reason"
        )
        self._first: Histogram = made(  # type: ignore
            Histogram, "time_to_first_token_seconds", "From the request to its first piece.", buckets=LATENCIES
        )
        self._between: Histogram = made(  # type: ignore
            Histogram, "inter_token_latency_seconds", "From a piece of a reply to the next.", buckets=LATENCIES
        )
        self._whole: Histogram = made(  # type: ignore
            Histogram, "e2e_request_latency_seconds", "From the request to its end.", buckets=LATENCIES
        )

    def set_load(self, running: int, waiting: int) -> None:
        """Takes down how many replies run and wait."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(running / self._engine.scheduler.max_rows)

    def observe(self, events: Sequence[Event], seconds: float, first: bool) -> None:
        """Counts what a request produced in one step, so long after its last piece, or after its arrival."""
        (self._first if first else self._between).observe(seconds)
        for event in events:
            if isinstance(event.value, Completion):
                self._generated.inc(len(event.value.ids))
                self._success.labels(self._model, event.value.finish_reason).inc()
                if event.sample == 0:
                    self._prompt.inc(event.value.prompt_tokens)

    def finish(self, seconds: float, cancelled: bool) -> None:
        """Counts a request that has ended or was cancelled, so long after its arrival."""
        self._whole.observe(seconds)
        if cancelled:
            self._success.labels(self._model, "abort").inc()

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        prefixes = self._engine.prefixes
        self._queries.set(0 if prefixes is None else prefixes.queried_tokens)
        self._hits.set(0 if prefixes is None else prefixes.hit_tokens)
        return generate_latest(self.registry)
