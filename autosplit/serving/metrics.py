"""Counters and gauges of running networks as Prometheus text (exposition format 0.0.4); serving it is up to the caller."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autosplit.running.pipeline import Pipeline
from autosplit.serving.devicemanager import DeviceManager


class Sample(NamedTuple):
    """One line: name without prefix, labels, value."""

    name: str
    labels: dict[str, object]
    value: float


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


def prometheus_text(networks: Mapping[str, Pipeline], devices: Mapping[str, DeviceManager]) -> str:
    """All metrics of these networks and devices. No worker is asked, so it may be called at any rate."""
    samples = [sample for name, pipeline in networks.items() for sample in _network(name, pipeline)]
    for name, manager in list(devices.items()):  # others may add devices meanwhile
        samples.append(Sample("device_used_bytes", {"device": name}, manager.used_bytes))
        if manager.free_bytes is not None:
            samples.append(Sample("device_free_bytes", {"device": name}, manager.free_bytes))
    lines = []
    for metric, (kind, text) in HELP.items():
        found = [sample for sample in samples if sample.name == metric]
        lines += [f"# HELP autosplit_{metric} {text}", f"# TYPE autosplit_{metric} {kind}"] if found else []
        lines += [f"autosplit_{metric}{{{_labels(sample.labels)}}} {sample.value!r}" for sample in found]
    return "\n".join(lines) + "\n"


def _network(name: str, pipeline: Pipeline) -> Iterable[Sample]:
    for worker in pipeline.health(name):
        labels: dict[str, object] = {"network": name, "stage": worker.stage, "replica": worker.replica, "device": worker.device}
        outcomes = {"done": worker.num_requests, "failed": worker.num_failed, "skipped": worker.num_skipped}
        for outcome, count in outcomes.items():
            yield Sample("requests_total", {**labels, "outcome": outcome}, count)
        for kind, seconds in {"busy": worker.busy_s, "wait": worker.wait_s, "transfer": worker.transfer_s}.items():
            yield Sample("worker_seconds_total", {**labels, "kind": kind}, seconds)
        yield Sample("worker_queue_seconds_total", labels, worker.queue_s)
        yield Sample("worker_queue", labels, worker.num_queued)
        yield Sample("worker_resident_bytes", labels, worker.resident_bytes)
        yield Sample("worker_up", labels, int(worker.state != "dead"))
    yield Sample("requests_waiting", {"network": name}, pipeline.num_waiting)
    yield Sample("requests_held", {"network": name}, pipeline.num_held)
    yield Sample("requests_running", {"network": name}, pipeline.num_running)
    if pipeline.batches.num_batches:
        yield Sample("batches_total", {"network": name}, pipeline.batches.num_batches)
        for kind, rows in {"request": pipeline.batches.num_rows, "padding": pipeline.batches.num_padding}.items():
            yield Sample("batch_rows_total", {"network": name, "kind": kind}, rows)
    yield Sample("restarts_total", {"network": name}, pipeline.restarts)
    latency = pipeline.latency()
    for quantile, seconds in {"0.5": latency.p50_s, "0.9": latency.p90_s, "0.99": latency.p99_s}.items():
        yield Sample("latency_seconds", {"network": name, "quantile": quantile}, seconds)


def _labels(labels: Mapping[str, object]) -> str:
    quoted = {key: str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, value in labels.items()}
    return ",".join(f'{key}="{value}"' for key, value in quoted.items())
