"""Prometheus metrics, read off the service when asked for: nothing is counted on the way of a job."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_gym.server.service import Service


class Metrics(Collector):
    """The service's own registry, so that two services in one process do not meet."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(namespace="prorl_gym", registry=self._registry)

    def render(self) -> bytes:
        """Everything, in the text exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at each render."""
        snapshot = self._service.pipeline.snapshot()
        yield CounterMetricFamily("prorl_gym_jobs", "Jobs taken in since start", value=snapshot.total)
        jobs = GaugeMetricFamily("prorl_gym_jobs_by_status", "Jobs that are known, by status", labels=["status"])
        for status, count in snapshot.jobs.items():
            jobs.add_metric([status], count)
        yield jobs
        queued = GaugeMetricFamily("prorl_gym_stage_queued", "Jobs that wait for a stage", labels=["stage"])
        active = GaugeMetricFamily("prorl_gym_stage_active", "Jobs inside a stage", labels=["stage"])
        for stage in ("init", "run", "eval"):
            queued.add_metric([stage], getattr(snapshot, f"{stage}_queue"))
            active.add_metric([stage], getattr(snapshot, f"active_{stage}"))
        yield from (queued, active)
        yield GaugeMetricFamily("prorl_gym_running", "1 while the pools run", value=snapshot.status == "running")
        yield GaugeMetricFamily(
            "prorl_gym_leftovers", "Sandboxes that could not be freed", value=len(self._service.leftovers())
        )
        yield from self._backends()

    def _backends(self) -> Iterator[Metric]:
        labels = ["policy", "address"]
        healthy = GaugeMetricFamily("prorl_gym_llm_server_healthy", "1 while the endpoint answers", labels=labels)
        tasks = GaugeMetricFamily("prorl_gym_llm_server_tasks", "Tasks that hold to the endpoint", labels=labels)
        for server in self._service.backends.servers():
            healthy.add_metric([server.policy, server.address], server.healthy)
            tasks.add_metric([server.policy, server.address], server.in_flight)
        yield from (healthy, tasks)
        yield GaugeMetricFamily(
            "prorl_gym_llm_calls_in_flight", "Model calls under way", value=self._service.backends.calls_in_flight
        )
