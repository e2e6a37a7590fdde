"""A plan that is served over HTTP in this process, and requests to it."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import autosplit
from autosplit.devices.limits import affinity
from autosplit.serving.hostmanager import HostManager
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import write_plan

pytest.importorskip("uvicorn", reason="serving needs the extra: pip install 'autosplit[serve]'")
from autosplit.webservice.application import Application
from autosplit.webservice.limits import ServerLimits
from autosplit.webservice.repository import Repository
from autosplit.webservice.server import WebServer

SPEC = "autosplit.examples.mlp:mlp?depth=3&width=16"
LIMITS = ServerLimits(body_bytes=100_000, body_s=1.0, idle_s=1.0, connections=64, drain_s=5.0)


def first_event(url: str) -> Any:
    """What the live page is told first."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n")
        found = b""
        while b"\n\n" not in found.partition(b"data: ")[2]:
            found += connection.recv(65536)
    return json.loads(found.partition(b"data: ")[2].partition(b"\n\n")[0])


@dataclass
class Served:
    """A running server and the model that it serves."""

    traced: autosplit.Traced
    application: Application
    url: str

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and content of an answer."""
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(content) if is_json else content

    def raw(self, data: bytes) -> bytes:
        """All that the server answers to these bytes until it closes the connection."""
        place = urlsplit(self.url)
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as connection:
            connection.sendall(data)
            found = b""
            with contextlib.suppress(ConnectionResetError):  # what was sent too much is not read
                while chunk := connection.recv(65536):
                    found += chunk
        return found


@contextlib.contextmanager
def listening(application: Application) -> Iterator[str]:
    """The address of a server that runs in a thread of this process."""
    started = threading.Event()
    server = WebServer(application, started.set, port=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    started.wait()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A model of two stages on up to two cores, served by this process."""
    traced = autosplit.trace(SPEC)
    names = [op.name for op in traced.graph.ops]
    cores = [f"cpu:{core}" for core in affinity()[:2]]
    parts = zip(("first", "second"), (names[:2], names[2:]), (cores[0], cores[-1]), strict=True)
    stages = tuple(Stage(name, tuple(ops), (core,), "eager", 1, 1e-4) for name, ops, core in parts)
    write_plan(Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN), traced.graph, folder / "mlp.yaml")
    with HostManager() as host:
        repository = Repository(host, {"mlp": folder / "mlp.yaml"}, folder)
        repository.load("mlp").result()
        application = Application(host, repository, LIMITS)
        with listening(application) as url:
            yield Served(traced, application, url)
        repository.close()


def beside(served: Served, limits: ServerLimits = LIMITS) -> Application:
    """Another application with the same models."""
    return Application(served.application.host, served.application.repository, limits)


def good(seed: int = 0, **fields: Any) -> dict[str, Any]:
    """A request that the model answers."""
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
    return {"inputs": [{"name": "input_1", "datatype": "FP32", "shape": [1, 16], "data": x.flatten().tolist()}], **fields}
