"""The record of a server's requests: counts for Prometheus (https://prometheus.io), and the lines of a log.

Names end as vLLM's do, so its dashboards fit; source of the names: https://docs.vllm.ai/en/stable/design/metrics/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quern.generate.engine import Engine
from quern.generate.reply import Completion, Event

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server; every one has the label `model_name`. A model's go on when its engine is replaced."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: type[Kind], name: str, text: str, *labels: str, **more: Any) -> Kind:
            return kind(f"quern:{name}", text, ("model_name", *labels), registry=self.registry, **more)

        seconds = partial(made, Histogram, buckets=LATENCIES)
        self.running = made(Gauge, "num_requests_running", "Replies that run, or whose prompts are being read.")
        self.waiting = made(Gauge, "num_requests_waiting", "Replies that wait for a seat.")
        self.usage = made(Gauge, "kv_cache_usage_perc", "Share of the seats that are taken.")
        self.prompt = made(Counter, "prompt_tokens", "Prompt tokens of finished requests.")
        self.generated = made(Counter, "generation_tokens", "Tokens of finished replies.")
        self.queries = made(Counter, "prefix_cache_queries", "Prompt tokens of finished requests that were looked up.")
        self.hits = made(Counter, "prefix_cache_hits", "Of these, tokens that were not read again.")
        self.success = made(Counter, "request_success", "Finished replies.", "finished_reason")
        self.first = seconds("time_to_first_token_seconds", "From the request to its first piece.")
        self.between = seconds("inter_token_latency_seconds", "From a piece of a reply to the next.")
        self.whole = seconds("e2e_request_latency_seconds", "From the request to its end.")

    def watch(self, name: str, engine: Engine, waiting: Callable[[], int]) -> None:
        """Shows the load of a model's engine and worker from now on, and its counters, which may be 0."""
        for counter in (self.prompt, self.generated, self.queries, self.hits, self.first, self.between, self.whole):
            counter.labels(name)
        self.running.labels(name).set_function(lambda: engine.running)
        self.waiting.labels(name).set_function(waiting)
        self.usage.labels(name).set_function(lambda: engine.running / engine.max_rows)

    def observe(self, name: str, events: Sequence[Event], seconds: float, first: bool) -> None:
        """Counts what a request to a model produced in one step, so long after its last piece, or its arrival."""
        (self.first if first else self.between).labels(name).observe(seconds)
        for event in events:
            if isinstance(event.value, Completion):
                self.generated.labels(name).inc(len(event.value.ids))
                self.success.labels(name, event.value.finish_reason).inc()
                if event.sample == 0:
                    self.prompt.labels(name).inc(event.value.prompt_tokens)
                    if event.value.cached_tokens is not None:
                        self.queries.labels(name).inc(event.value.prompt_tokens)
                        self.hits.labels(name).inc(event.value.cached_tokens)

    def finish(self, name: str, seconds: float, early: str | None) -> None:
        """Counts a request that has ended, so long after its arrival. early: "abort" or "error", if cut short."""
        self.whole.labels(name).observe(seconds)
        if early:
            self.success.labels(name, early).inc()


def append_to(file: FileIO, log: Callable[[str], None]) -> Callable[[str], None]:
    """A `Gate.log` that appends to a file. A line that cannot be written is left out; `log` says so, once in a row."""
    fails, torn = False, b""  # the rest of a line for which there was no room

    def append(line: str) -> None:
        nonlocal fails, torn
        try:
            data = torn + line.encode() + b"\n"  # by one system call: replicas append to the same file
            torn = data[file.write(data) :]
            fails = False
        except OSError as error:
            if not fails:
                log(f"requests are missing in {file.name} ({error.strerror}): make room there")
            fails = True

    return append
