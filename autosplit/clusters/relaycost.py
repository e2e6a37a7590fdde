"""Measure the processor time of the processes that relay requests: the driver, and the agent of the host that answers.

A pipeline of one stage runs on the host. The stage has more or fewer layers, so that the relaying processes find more or less of
their code and data in the cache. Processor time hardly depends on other load of the cores, and the kernel's network code counts
for its caller.
"""

import time
from collections.abc import Iterator
from math import exp
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional

from autosplit.backends.workspace import Workspace
from autosplit.clusters.fleet import Fleet
from autosplit.clusters.remote import HostsPipeline
from autosplit.deploying.networks import place
from autosplit.tracing import capturing, loading
from autosplit.values.links import Link
from autosplit.values.machine import HOST
from autosplit.values.plan import PYTHON_OBJECT, UNKNOWN, Plan, Stage

WARM_BYTES, COLD_BYTES = 1 << 20, 64 << 20
"""Bytes of weights that a stage reads for each request to leave the cache as it was, and to replace what is in it."""

LAYER_WIDTH = 512
"""Numbers that a layer takes and makes; its weights have 1 MiB."""

COOLING_S = 4e-3
"""Seconds of other work on a core that take the relaying time 63 % of the way from warm to cold.

Driver and agents were at 0.35, 0.5, 0.75 and 0.9 of the way beside stages that work 1.3, 3.6, 5.7 and 9.2 ms for a request. The
bytes of these models, 32, 14, 15 and 117 MB, tell less.
"""

SMALL_BYTES, LARGE_BYTES = 4 << 10, 512 << 10
"""Bytes of a request, and of its answer."""

WARM_UP, LEAST_REQUESTS, MOST_REQUESTS, MEASURE_S = 8, 4, 150, 0.15
"""Requests before a measurement, and least and most requests of it; in between as many as fit into its seconds."""

NUM_PARTS = 3
"""Measurements, of which the median counts: once in a while a process does something else, and took ten times as long."""


class _Spent(NamedTuple):
    """Processor seconds of one request and its answer in the driver and in the agent."""

    driver_s: float
    agent_s: float


class Layers(torch.nn.Module):
    """A model of layers that read so many bytes of weights, which it makes itself; it answers with its input.

    It runs the code of several ops, as models do. Beside a stage that only wrote to its memory, relaying took a third less.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_layers = num_bytes // (4 * LAYER_WIDTH**2)

    def forward(self, request: torch.Tensor) -> torch.Tensor:
        """The input, plus nothing that depends on all layers."""
        weights = torch.zeros(self._num_layers, LAYER_WIDTH, LAYER_WIDTH)
        value = request[:LAYER_WIDTH]
        for number in range(self._num_layers):
            value = functional.gelu(functional.linear(value, weights[number]))
            value = torch.softmax(functional.layer_norm(value, (LAYER_WIDTH,)), -1)
        return request + 0 * value.sum()


def measure_relay(cluster: Fleet, host: str) -> Link:
    """Processor seconds of the driver (as sender) and of a host's agent (as receiver) for one way of a request between them.

    A request and its answer count the same. The cold parts are those beside a stage of ``COLD_BYTES``.

    Raises: BackendError, WorkerError: the pipeline could not be opened, or failed.
    """
    warm, cold, large = (
        _spent(cluster, host, num_bytes, weights_bytes)
        for num_bytes, weights_bytes in ((SMALL_BYTES, WARM_BYTES), (SMALL_BYTES, COLD_BYTES), (LARGE_BYTES, WARM_BYTES))
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


def relay_after(relay: Link, work_s: float) -> Link:
    """The relay beside stages that work so many seconds for a request: its fixed parts lie between the warm and the cold ones."""
    share = 1 - exp(-work_s / COOLING_S)
    send_s = relay.send_s + share * (relay.cold_send_s - relay.send_s)
    receive_s = relay.receive_s + share * (relay.cold_receive_s - relay.receive_s)
    return Link(relay.source, relay.target, 0.0, send_s, relay.send_s_per_byte, receive_s, relay.receive_s_per_byte)


def _spent(cluster: Fleet, host: str, num_bytes: int, weights_bytes: int) -> _Spent:
    request = (torch.zeros(num_bytes // 4),)
    traced = capturing.trace(
        loading.load_model(Layers(weights_bytes).eval(), 1, None, inputs=loading.call_of(request, None, None))
    )
    device = next(device.name for device in cluster.machine.devices if device.host == host)
    stage = Stage("layers", tuple(op.name for op in traced.graph.ops), (device,))
    with Workspace() as workspace:
        stages = place(traced, Plan(PYTHON_OBJECT, traced.graph.hash, "", (stage,), UNKNOWN), cluster.machine, workspace)
        with HostsPipeline(cluster, stages, traced.graph.inputs, traced.graph.outputs) as pipeline:
            pipeline.run_many([request] * WARM_UP)
            parts = []
            for _ in range(NUM_PARTS):
                begun = _Spent(time.process_time(), *cluster.ask([(host, "process_time_s")]))
                num_requests = sum(1 for _ in pipeline.stream(_as_many_as_fit(request)))
                ended = _Spent(time.process_time(), *cluster.ask([(host, "process_time_s")]))
                parts.append([(after_s - before_s) / num_requests for before_s, after_s in zip(begun, ended, strict=True)])
    return _Spent(*map(median, zip(*parts, strict=True)))


def _as_many_as_fit(request: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    until_s = time.monotonic() + MEASURE_S
    for number in range(MOST_REQUESTS):
        if number >= LEAST_REQUESTS and time.monotonic() > until_s:
            return
        yield request
