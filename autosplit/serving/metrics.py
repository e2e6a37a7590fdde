"""Counters and gauges of running networks for Prometheus, by prometheus_client; serving them is up to the caller."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autosplit.errors import MissingExtraError
from autosplit.values.machine import HOST, host_of

if TYPE_CHECKING:
    from prometheus_client import Metric


Sample = tuple[str, dict[str, object], float]
"""Name without prefix, labels, value."""

HELP = {
    "requests_total": ("counter", "Requests that passed a worker, by outcome."),
    "worker_seconds_total": ("counter", "Time of a worker, by what it did."),
    "worker_queue_seconds_total": ("counter", "Time for which requests were ready before a worker took them."),
    "worker_queue": ("gauge", "Requests that are ready for a worker."),
    "worker_resident_bytes": ("gauge", "Physical memory that a worker maps now."),
    "worker_up": ("gauge", "1 if the worker is alive."),
    "requests_waiting": ("gauge", "Requests in the admission queue."),
    "requests_held": ("gauge", "Requests that wait in memory of their callers."),
    "requests_running": ("gauge", "Requests in the stages."),
    "batches_total": ("counter", "Batches that were filled with rows of requests."),
    "batch_rows_total": ("counter", "Rows in these batches, by kind."),
    "restarts_total": ("counter", "Workers that died and were replaced."),
    "latency_seconds": ("gauge", "From the first stage to the answer, quantiles of the last requests."),
    "device_used_bytes": ("gauge", "Memory reserved for the stages on a device."),
    "device_free_bytes": ("gauge", "Memory left on a device that has a cap."),
}


class HostMetrics:
    """The health of a host (``HostManager.health``) for prometheus_client, read anew for each answer."""

    def __init__(self, health: Callable[[], Mapping[str, Any]]) -> None:
        self._health = health

    def collect(self) -> Iterator["Metric"]:
        """All metrics that have a sample now."""
        from prometheus_client import Metric

        found: dict[str, Metric] = {}
        for name, labels, value in _samples(self._health()):
            kind, text = HELP[name]
            metric = found.setdefault(name, Metric(f"autosplit_{name.removesuffix('_total')}", text, kind))
            metric.add_sample(f"autosplit_{name}", {key: str(label) for key, label in labels.items()}, value)
        yield from found.values()

    def text(self) -> str:
        """All metrics as Prometheus reads them. Raises: MissingExtraError: prometheus_client is not installed."""
        try:
            from prometheus_client import generate_latest
        except ModuleNotFoundError:
            raise MissingExtraError("metrics need 'prometheus-client'; install it: pip install 'autosplit[serve]'") from None
        return generate_latest(self).decode()


def _samples(health: Mapping[str, Any]) -> Iterator[Sample]:
    for worker in health["workers"]:
        yield from _worker(worker)
    for name, network in health["networks"].items():
        yield from _network(name, network)
    for name, device in health["devices"].items():
        yield "device_used_bytes", {"device": name}, device["used_bytes"]
        if device["free_bytes"] is not None:
            yield "device_free_bytes", {"device": name}, device["free_bytes"]


def _worker(worker: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {key: worker[key] for key in ("network", "stage", "replica", "device")}
    if (host := host_of(worker["device"])) != HOST:
        labels["host"] = host
    for outcome, key in {"done": "num_requests", "failed": "num_failed", "skipped": "num_skipped"}.items():
        yield "requests_total", {**labels, "outcome": outcome}, worker[key]
    for kind in ("busy", "wait", "transfer"):
        yield "worker_seconds_total", {**labels, "kind": kind}, worker[f"{kind}_s"]
    yield "worker_queue_seconds_total", labels, worker["queue_s"]
    yield "worker_queue", labels, worker["num_queued"]
    yield "worker_resident_bytes", labels, worker["resident_bytes"]
    yield "worker_up", labels, int(worker["state"] != "dead")


def _network(name: str, network: Mapping[str, Any]) -> Iterator[Sample]:
    if "num_answered" not in network:  # it is not ready
        return
    labels: dict[str, object] = {"network": name}
    for metric in ("waiting", "held", "running"):
        yield f"requests_{metric}", labels, network[f"num_{metric}"]
    if network["num_batches"]:
        yield "batches_total", labels, network["num_batches"]
        rows = round(network["rows_per_request"] * network["num_batches"])
        for kind, count in {"request": rows, "padding": network["num_padding"]}.items():
            yield "batch_rows_total", {**labels, "kind": kind}, count
    yield "restarts_total", labels, network["restarts"]
    for quantile, key in {"0.5": "p50", "0.9": "p90", "0.99": "p99"}.items():
        yield "latency_seconds", {**labels, "quantile": quantile}, network["latency_s"][key]
