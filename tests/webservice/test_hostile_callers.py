"""Callers that send too much, too slowly or nothing: each gets its end, others are served, and nothing is left behind."""

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import psutil
import pytest
from pipelines import wait_until
from servedplans import LIMITS, Served, beside, good, listening

from autosplit.webservice.connections import KEPT_FILES, limited_protocol
from autosplit.webservice.limits import ServerLimits

CROWD, CROWD_BYTES = 4_000, 24 << 20
"""Idle callers at once, and memory by which they may let the process grow: sockets of each side, and what the allocator keeps."""


@contextlib.contextmanager
def nothing_left_behind(most_bytes: int = 2 * CROWD_BYTES) -> Iterator[None]:
    """Compares processes, files and memory of this process, which is both server and caller."""
    me = psutil.Process()
    processes, files, memory_bytes = len(me.children(recursive=True)), me.num_fds(), me.memory_info().rss
    yield
    wait_until(lambda: len(me.children(recursive=True)) <= processes and me.num_fds() <= files + 8)
    assert me.memory_info().rss - memory_bytes < most_bytes


def connect(served: Served) -> socket.socket:
    place = urlsplit(served.url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=60)


def posted(body: bytes) -> bytes:
    return f"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_a_large_body_is_refused_before_it_is_read(served: Served) -> None:
    head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    assert b"413" in served.raw(head).split(b"\r\n")[0]
    chunk = b"ffff\r\n" + bytes(0xFFFF) + b"\r\n"
    head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b"413" in served.raw(head + 2 * chunk).split(b"\r\n")[0]
    assert served.application.bodies.num_bytes == 0


def test_half_a_request_ends_in_time(served: Served) -> None:
    heads = b"POST /v2/models/mlp/infer HTT", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000
    body = b"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"
    with ThreadPoolExecutor(3) as pool:
        *nothing, refused = pool.map(served.raw, (*heads, body), timeout=30)
    assert nothing == [b"", b""] and b"408" in refused.split(b"\r\n")[0]


def test_idle_connections_leave_room_for_others(served: Served) -> None:
    place = urlsplit(served.url)
    idle = [socket.create_connection((place.hostname or "", place.port or 0)) for _ in range(LIMITS.connections + 8)]
    try:
        idle[-1].settimeout(30)
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 503")
        wait_until(lambda: served.call("GET", "/v2/health/live")[0] == 200)
    finally:
        for connection in idle:
            connection.close()


def test_as_many_idle_connections_as_there_are_files_leave_requests_alone(served: Served) -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    number = min(CROWD, most // 2 - 500)  # both ends are in this process
    try:
        application = beside(served, ServerLimits(connections=number + 1))
        with listening(application) as url:
            served = replace(served, application=application, url=url)
            served.call("POST", "/v2/models/mlp/infer", good())
            for _ in range(2):  # what the first crowd left in the allocator, the second one takes
                with nothing_left_behind(CROWD_BYTES), contextlib.ExitStack() as opened:
                    for _ in range(number):
                        opened.enter_context(connect(served))
                    assert served.call("POST", "/v2/models/mlp/infer", good())[0] == 200
                    wait_until(lambda: b"HTTP/1.1 503" in refusal(served))
            wait_until(lambda: served.call("POST", "/v2/models/mlp/infer", good())[0] == 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def test_connections_leave_files_for_models() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        assert limited_protocol(ServerLimits(connections=1000)).limits.connections == 512 - KEPT_FILES
        assert limited_protocol(ServerLimits(connections=100)).limits.connections == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def refusal(served: Served) -> bytes:
    """What two more connections hear, of which one is too many."""
    with connect(served) as one, connect(served) as other:
        one.settimeout(0.2)
        other.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            return other.recv(100)
        with contextlib.suppress(TimeoutError):
            return one.recv(100)
        return b""


def test_slow_callers_and_those_that_take_no_answer_hold_nobody_up(served: Served) -> None:
    with nothing_left_behind():
        with connect(served) as slow, connect(served) as deaf:
            deaf.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(20_000):
                    deaf.send(posted(json.dumps(good()).encode()))
            begun_s = time.monotonic()
            with pytest.raises(OSError):  # a byte now and then does not keep a connection
                while time.monotonic() - begun_s < 20:
                    slow.sendall(b"P")
                    time.sleep(0.1)
                    assert served.call("POST", "/v2/models/mlp/infer", good())[0] == 200
            assert time.monotonic() - begun_s < 10 * LIMITS.idle_s
        wait_until(lambda: served.application.bodies.num_bytes == 0)


def test_100_loads_and_unloads_at_once(served: Served) -> None:
    with nothing_left_behind(), ThreadPoolExecutor(100) as pool:
        words = [("load", "unload")[number % 3 == 0] for number in range(100)]
        found = list(pool.map(lambda word: served.call("POST", f"/v2/repository/models/mlp/{word}"), words))
        assert {status for status, _ in found} <= {200, 400, 429, 503} and (200, {}) in found
        assert all(status == 200 or "error" in answer for status, answer in found)
        assert served.call("POST", "/v2/repository/models/mlp/load")[0] == 200
        assert served.call("POST", "/v2/models/mlp/infer", good())[0] == 200
