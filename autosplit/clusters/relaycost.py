"""Measure the processor time of the processes that relay requests: the driver, and the agent of the host that answers.

A pipeline of one stage runs on the host. The stage sweeps memory, so that the relaying processes find more or less of their data
in the cache. Processor time does not depend on other load of the cores, and the kernel's network code counts for its caller.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autosplit.clusters.fleet import Fleet
from autosplit.clusters.remote import HostsPipeline
from autosplit.deploying.workspace import Workspace, place
from autosplit.tracing import capturing, loading
from autosplit.values.links import Link
from autosplit.values.machine import HOST
from autosplit.values.plan import PYTHON_OBJECT, UNKNOWN, Plan, Stage

WARM_BYTES, COLD_BYTES = 1 << 20, 64 << 20
"""Bytes that a stage sweeps for each request to leave the cache as it was, and to replace what is in it."""

SMALL_BYTES, LARGE_BYTES = 4 << 10, 512 << 10
"""Bytes of a request, and of its answer."""

WARM_UP, LEAST_REQUESTS, MOST_REQUESTS, MEASURE_S = 8, 8, 400, 0.5
"""Requests before a measurement, and least and most requests of it; in between as many as fit into its seconds."""


class _Spent(NamedTuple):
    """Processor seconds of one request and its answer in the driver and in the agent."""

    driver_s: float
    agent_s: float


class Sweep(torch.nn.Module):
    """A model that writes and reads a number of bytes of memory, and answers with its input."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_elements = num_bytes // 4

    def forward(self, request: torch.Tensor) -> torch.Tensor:
        """The input, plus the sum of the memory, which is 0."""
        return request + torch.zeros(self._num_elements).sum()


def measure_relay(cluster: Fleet, host: str) -> Link:
    """Processor seconds of the driver (as sender) and of a host's agent (as receiver) for one way of a request between them.

    A request and its answer count the same. The cold parts are those beside a stage that sweeps ``COLD_BYTES``.

    Raises: BackendError, WorkerError: the pipeline could not be opened, or failed.
    """
    warm, cold, large = (
        _spent(cluster, host, num_bytes, swept_bytes)
        for num_bytes, swept_bytes in ((SMALL_BYTES, WARM_BYTES), (SMALL_BYTES, COLD_BYTES), (LARGE_BYTES, WARM_BYTES))
    )
    driver_s_per_byte, agent_s_per_byte = (
        max(0.0, more_s - less_s) / 2 / (LARGE_BYTES - SMALL_BYTES) for more_s, less_s in zip(large, warm, strict=True)
    )
    return Link(
        HOST,
        host,
        latency_s=0.0,
        send_s=warm.driver_s / 2,
        send_s_per_byte=driver_s_per_byte,
        receive_s=warm.agent_s / 2,
        receive_s_per_byte=agent_s_per_byte,
        cold_send_s=max(warm.driver_s, cold.driver_s) / 2,
        cold_receive_s=max(warm.agent_s, cold.agent_s) / 2,
    )


def relay_after(relay: Link, swept_bytes: float) -> Link:
    """The relay for a model that uses so many bytes for each request: its fixed parts lie between the warm and the cold ones."""
    share = min(1.0, swept_bytes / COLD_BYTES)
    send_s = relay.send_s + share * (relay.cold_send_s - relay.send_s)
    receive_s = relay.receive_s + share * (relay.cold_receive_s - relay.receive_s)
    return Link(relay.source, relay.target, 0.0, send_s, relay.send_s_per_byte, receive_s, relay.receive_s_per_byte)


def _spent(cluster: Fleet, host: str, num_bytes: int, swept_bytes: int) -> _Spent:
    request = (torch.zeros(num_bytes // 4),)
    traced = capturing.trace(loading.load_model(Sweep(swept_bytes).eval(), 1, None, inputs=loading.call_of(request, None, None)))
    device = next(device.name for device in cluster.machine.devices if device.host == host)
    stage = Stage("sweep", tuple(op.name for op in traced.graph.ops), (device,))
    with Workspace() as workspace:
        stages = place(traced, Plan(PYTHON_OBJECT, traced.graph.hash, "", (stage,), UNKNOWN), cluster.machine, workspace)
        with HostsPipeline(cluster, stages, traced.graph.inputs, traced.graph.outputs) as pipeline:
            pipeline.run_many([request] * WARM_UP)
            begun = _Spent(time.process_time(), *cluster.ask([(host, "process_time_s")]))
            num_requests = sum(1 for _ in pipeline.stream(_as_many_as_fit(request)))
            ended = _Spent(time.process_time(), *cluster.ask([(host, "process_time_s")]))
    return _Spent(*((after_s - before_s) / num_requests for before_s, after_s in zip(begun, ended, strict=True)))


def _as_many_as_fit(request: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    until_s = time.monotonic() + MEASURE_S
    for number in range(MOST_REQUESTS):
        if number >= LEAST_REQUESTS and time.monotonic() > until_s:
            return
        yield request
