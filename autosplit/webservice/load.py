"""Load on a server of the Open Inference Protocol: requests at a rate, or so many at a time."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import aiohttp
import torch

from autosplit.costs.schedule import poisson_arrivals
from autosplit.errors import UsageError
from autosplit.parsing import MALFORMED, shown
from autosplit.reports.results import LatencyStats
from autosplit.webservice.tensors import DATATYPES, JSON_LENGTH

TIMEOUT_S = 60.0
"""Seconds after which a request counts as failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, and a request with made-up values for it.

    Attributes:
        url: the address of ``infer``.
        body: the request, its tensors as binary data.
        headers: its headers.
    """

    url: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The measurements of a server under a load.

    Attributes:
        seconds: from the first request to the last answer.
        latency: seconds of requests with status 200; at a rate, from the time at which a request was meant to start, so that a
            late start counts as waiting.
        statuses: status to number of requests; 0 stands for a connection that failed.
    """

    seconds: float
    latency: LatencyStats
    statuses: Mapping[int, int]

    @property
    def answered_per_s(self) -> float:
        """Requests with status 200 a second."""
        return self.statuses.get(200, 0) / self.seconds


def load_at_rate(target: Target, rate_per_s: float, seconds: float) -> LoadResult:
    """Send requests that come independently of each other (a Poisson process), without waiting for answers."""
    num_requests = max(1, round(rate_per_s * seconds))
    return asyncio.run(_load(target, poisson_arrivals(rate_per_s, num_requests), None, seconds))


def load_in_flight(target: Target, num_in_flight: int, seconds: float) -> LoadResult:
    """Keep so many requests under way: each caller sends its next one after its answer."""
    return asyncio.run(_load(target, None, num_in_flight, seconds))


def find_target(server: str, model: str = "", token: str = "") -> Target:
    """The model of a server, the only one by default. Raises: UsageError: the server does not answer, or has no such model."""
    return asyncio.run(_find(server.rstrip("/"), model, {"authorization": f"Bearer {token}"} if token else {}))


def measure_http_s(target: Target, rate_per_s: float) -> float:
    """Seconds that HTTP costs at a rate: the median of 50 requests with the same body, which the server reads and refuses."""
    length = int(target.headers[JSON_LENGTH])
    text = json.dumps({**json.loads(target.body[:length]), "outputs": [{"name": "no such output"}]}).encode()
    refused = Target(target.url, text + target.body[length:], {**target.headers, JSON_LENGTH: str(len(text))})
    return asyncio.run(_load(refused, poisson_arrivals(rate_per_s, 50), None, 0.0, 400)).latency.p50_s


async def _find(server: str, model: str, headers: Mapping[str, str]) -> Target:
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            if not model:
                async with session.post(f"{server}/v2/repository/index", json={}, raise_for_status=True) as answer:
                    names = [row["name"] for row in await answer.json() if row.get("state") == "READY"]
                if len(names) != 1:
                    raise UsageError(f"name a model; '{server}' serves: {', '.join(names) or 'none'}")
                (model,) = names
            async with session.get(f"{server}/v2/models/{model}", raise_for_status=True) as answer:
                about = await answer.json()
        return _target(f"{server}/v2/models/{model}/infer", about["inputs"], headers)
    except aiohttp.InvalidURL:
        raise UsageError(f"{shown(server)} is not the address of a server; write http://HOST:PORT") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as failure:
        raise UsageError(f"'{server}' does not list its models: {failure or type(failure).__name__}") from None
    except MALFORMED as failure:
        if isinstance(failure, UsageError):
            raise
        raise UsageError(f"'{server}' does not speak the Open Inference Protocol: {failure!r:.200}") from None


def _target(url: str, inputs: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> Target:
    """A request for inputs as a server announces them: random numbers, zeros as integers, 1 for sizes that it leaves open."""
    dtypes = {datatype: getattr(torch, dtype) for dtype, datatype in DATATYPES.items()}
    rows, binary = [], []
    for one in inputs:
        if one["datatype"] not in dtypes:
            raise UsageError(f"input {shown(one['name'])} has datatype {shown(one['datatype'])}, for which no values are made up")
        shape, dtype = [max(1, size) if size < 0 else size for size in one["shape"]], dtypes[one["datatype"]]
        values = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
        binary.append(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        size = {"binary_data_size": prod(shape) * dtype.itemsize}
        rows.append({"name": one["name"], "datatype": one["datatype"], "shape": shape, "parameters": size})
    text = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}}).encode()
    return Target(url, b"".join([text, *binary]), {**headers, JSON_LENGTH: str(len(text))})


async def _load(
    target: Target, arrivals_s: Sequence[float] | None, num_in_flight: int | None, seconds: float, timed_status: int = 200
) -> LoadResult:
    latencies_s, statuses = list[float](), Counter[int]()
    limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=limits[0], timeout=limits[1], headers=target.headers) as session:
        begun_s = time.perf_counter()

        async def send(due_s: float) -> None:
            try:
                async with session.post(target.url, data=target.body) as answer:
                    await answer.read()
                    status = answer.status
            except (aiohttp.ClientError, OSError, TimeoutError):
                status = 0
            statuses[status] += 1
            if status == timed_status:
                latencies_s.append(time.perf_counter() - begun_s - due_s)

        async def call() -> None:
            while (now_s := time.perf_counter() - begun_s) < seconds:
                await send(now_s)

        async with asyncio.TaskGroup() as tasks:
            for due_s in arrivals_s or ():
                await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - begun_s)))
                tasks.create_task(send(due_s))
            for _ in range(num_in_flight or 0):
                tasks.create_task(call())
        return LoadResult(time.perf_counter() - begun_s, LatencyStats.of(latencies_s), dict(sorted(statuses.items())))
