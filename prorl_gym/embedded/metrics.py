"""Prometheus metrics under vLLM's names, so that the same dashboards and scrapers read both."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prorl_gym.embedded.sequence import Sequence

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts what the engine does; called from its thread, read from any."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(model)

        def histogram(name: str, text: str) -> Histogram:
            whole = Histogram(f"vllm:{name}", text, ["model_name"], buckets=SECONDS, registry=self._registry)
            return whole.labels(model)

        self._running = gauge("num_requests_running", "Sequences being computed.")
        self._waiting = gauge("num_requests_waiting", "Sequences waiting for a slot.")
        self._cache_usage = gauge("kv_cache_usage_perc", "Slots in use, 1 means all.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of sequences that began.")
        self._sampled = counter("generation_tokens", "Sampled tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._first = histogram("time_to_first_token_seconds", "From submit to the first sampled token.")
        self._whole = histogram("e2e_request_latency_seconds", "From submit to the end.")
        self._ended = Counter(
            "vllm:request_success",
            "Ended sequences by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )

    def stepped(self, *, running: int, waiting: int, cache_usage: float, sampled: int) -> None:
        """See `engine.EngineMetrics`."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._cache_usage.set(cache_usage)
        self._sampled.inc(sampled)

    def began(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """See `engine.EngineMetrics`."""
        self._prompt.inc(prompt_tokens)
        self._queries.inc(prompt_tokens)
        self._hits.inc(cached_tokens)

    def ended(self, sequence: Sequence) -> None:
        """See `engine.EngineMetrics`."""
        self._ended.labels(self._model, sequence.finish_reason).inc()
        self._whole.observe(time.monotonic() - sequence.submitted_s)
        if sequence.first_token_s is not None:
            self._first.observe(sequence.first_token_s - sequence.submitted_s)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)
