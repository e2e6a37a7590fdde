"""Frames and greetings of a peer that knows the secret of the run, but breaks the rules: at the agent, and at the driver.

No thread dies, the connection is closed, its requests fail, and honest connections beside it go on. ``AUTOSPLIT_FUZZ_CASES``
sets the number of mutated streams of each end.
"""

import concurrent.futures
import gc
import hmac
import json
import math
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest
import torch
from hosts import SECRET, Hosts, on_hosts
from pipelines import Gate, at_widths, double, request, spec

from autosplit.clusters import runningsegment
from autosplit.clusters.agent import ANSWERS, CONTROL, NUM_SLOTS, PROBE, PURPOSE, REQUESTS, SEGMENT, SENDER, Agent
from autosplit.clusters.frames import BEAT, BROKEN, CANCEL, CREDIT, ERROR, REQUEST
from autosplit.clusters.handshake import dial
from autosplit.clusters.hoststransport import HostsPipeline
from autosplit.clusters.listener import Listener
from autosplit.clusters.segments import DRIVER, Segment
from autosplit.errors import AutosplitError, WorkerError
from autosplit.running.stage import StagePlacement

NUM_CASES = int(os.environ.get("AUTOSPLIT_FUZZ_CASES", "100"))
MOST_BYTES = 200 << 20
WAIT_S = 30.0

pytestmark = pytest.mark.timeout(60 + NUM_CASES)

HEADER = struct.Struct("<BxHiQdQ")
TENSOR = struct.pack("<4f", 1, 2, 3, 4)
"""The bytes of a value of these tests."""

KINDS = (*range(BEAT + 2), 77, 255)
NUMBERS = (0, 1, 2, 3, 7, 1024, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
PRIORITIES = (0, 1, -1, 2**31 - 1, -(2**31))
VARIANTS = (0, 1, 2, 255, 65_535)
DEADLINES = (0.0, 1.0, -0.0, -1.0, 5e-324, 4.6e9, 1e10, 1e308, -1e308, math.nan, math.inf, -math.inf)
SIZES = (0, 1, 15, 16, 17, 32, 60_000, 65_536, 65_537, 2**31, 2**62, 2**63, 2**64 - 1)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**400, 0.5, 1e308, math.nan, math.inf, "", "x", "x" * 50_000, "\0", [], [[]], {}, ["x"] * 2000,
)  # fmt: skip
"""Values that stand in for others in greetings."""


def frame(
    kind: int,
    number: int = 0,
    left_s: float = 0.0,
    num_bytes: int | None = None,
    body: bytes = b"",
    urgency: int = 0,
    variant: int = 0,
) -> bytes:
    """A frame with any header."""
    return HEADER.pack(kind, variant, urgency, number, left_s, len(body) if num_bytes is None else num_bytes) + body


def mutated_stream(draw: random.Random) -> bytes:
    """Some frames, of which most have odd fields; perhaps cut off."""
    parts = []
    for _ in range(draw.randrange(1, 6)):
        kind = draw.choice(KINDS)
        body = draw.choice((TENSOR, b"", draw.randbytes(draw.choice(SIZES[:8])), b"WorkerError\nit failed", b"evil\nwhy"))
        odd = [draw.random() < 0.3 for _ in range(4)]
        parts.append(
            draw.randbytes(draw.randrange(100))
            if all(odd)
            else frame(
                kind,
                draw.choice(NUMBERS) if odd[0] else draw.randrange(3),
                draw.choice(DEADLINES) if odd[1] else 0.0,
                draw.choice(SIZES) if odd[2] else len(body),
                body,
                draw.choice(PRIORITIES) if odd[3] else 0,
                draw.choice(VARIANTS) if draw.random() < 0.3 else 0,
            )
        )
    stream = b"".join(parts)
    return stream[: draw.randrange(len(stream) + 1)] if draw.random() < 0.2 else stream


def stage(device: str, function: Callable[..., Any] = double) -> StagePlacement:
    return at_widths(on_hosts(function, device), 2)


def pipeline(**hosts: Agent | Listener) -> HostsPipeline:
    """A pipeline of one stage on the first of some hosts."""
    return HostsPipeline(Hosts(**hosts), [stage(f"{next(iter(hosts))}/null:0")], ["x"], ["y"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    opened = Agent("good", "127.0.0.1", SECRET)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def honest(agent: Agent) -> Iterator[HostsPipeline]:
    """An honest driver with an honest host."""
    with pipeline(good=agent) as opened:
        while any(thread.name == "autosplit-welcome" for thread in threading.enumerate()):  # the threads of its connections are
            time.sleep(1e-3)  # not all there yet, and a test that counts threads would take them for left over
        yield opened


@pytest.fixture(autouse=True)
def no_thread_dies(honest: HostsPipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, no thread has ended with an exception, and the honest pipeline still runs."""
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert not died, [f"{one.thread}: {one.exc_value!r}" for one in died]
    assert torch.equal(honest.submit(request(3)).result(WAIT_S)[0], 2 * request(3)[0])


def read_to_end(sock: socket.socket) -> bytes:
    """Send no more, and read until the other end has closed too."""
    found = b""
    sock.settimeout(WAIT_S)
    with suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            found += data
            assert len(found) < 1 << 20, "the connection stays open, with signs of life alone"
    return found


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes, though this one could still send."""
    sock.settimeout(WAIT_S)
    with suppress(ConnectionError):
        return any(not sock.recv(1 << 16) for _ in range(6))  # a few signs of life; after ten it is closed because it is silent
    return True


def proved(agent: Agent) -> socket.socket:
    """A connection that has proved the secret, before its greeting."""
    sock = socket.create_connection(agent.address, WAIT_S)
    own = bytes(32)
    other = sock.recv(32, socket.MSG_WAITALL)
    sock.sendall(own + hmac.digest(SECRET, b"dials" + own + other, "sha256"))
    sock.recv(32, socket.MSG_WAITALL)
    return sock


@contextmanager
def opened(
    agent: Agent, name: str, sources: tuple[str, ...] = ("evil",), function: Callable[..., Any] = double
) -> Iterator[None]:
    """A segment that runs on the agent for a block, with two slots for each source."""
    layouts = [((spec(value),), (spec(value, 2),)) for value in "xy"]
    agent.open_segment(Segment(name, (stage("null:0", function),), ("b",), *layouts, 2, sources), {})
    try:
        yield
    finally:
        agent.close_segment(name)


def connect(agent: Agent, segment: str, purpose: str, sender: str = "evil", num_slots: int = 4) -> socket.socket:
    """A connection to a segment."""
    return dial(agent.address, SECRET, {PURPOSE: purpose, SEGMENT: segment, SENDER: sender, NUM_SLOTS: num_slots})


def in_use() -> tuple[int, int]:
    """Bytes of memory and threads of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss, threading.active_count()


def assert_given_back(begun_bytes: int, num_threads: int) -> None:
    """Memory has hardly grown, and threads have ended, or do so soon: the end of a segment does not wait for them."""
    until_s = time.monotonic() + WAIT_S
    while threading.active_count() > num_threads and time.monotonic() < until_s:
        time.sleep(0.01)
    ended_bytes, left_threads = in_use()
    assert ended_bytes - begun_bytes < MOST_BYTES and left_threads <= num_threads


def mutated_greeting(draw: random.Random, segment: str) -> bytes:
    """A greeting with odd fields or odd bytes, with its length, which may be wrong."""
    hello: dict[str, Any] = {
        PURPOSE: draw.choice((REQUESTS, ANSWERS, CONTROL, PROBE)),
        SEGMENT: segment,
        SENDER: "evil",
        NUM_SLOTS: 4,
    }
    for key in list(hello):
        if draw.random() < 0.4:
            hello[key] = draw.choice(ODD)
    text = json.dumps(hello).encode()
    text = draw.choice((text, text, text, draw.randbytes(50), b"[" * 60_000, b'{"a":' * 10_000, b"[1e999]", b"9" * 5000))
    return struct.pack("<Q", draw.choice(SIZES) if draw.random() < 0.2 else len(text)) + text


def test_no_mutated_stream_harms_an_agent(agent: Agent, honest: HostsPipeline) -> None:
    (begun_bytes, num_threads), x = in_use(), request(5)
    for number in range(NUM_CASES):
        draw, name = random.Random(f"agent {number}"), f"hostile {number}"
        with opened(agent, name), ExitStack() as sockets:
            purpose = draw.choice((REQUESTS, REQUESTS, REQUESTS, ANSWERS, CONTROL, PROBE, "greeting"))
            if purpose == REQUESTS:
                sockets.enter_context(connect(agent, name, ANSWERS))
            sock = sockets.enter_context(proved(agent) if purpose == "greeting" else connect(agent, name, purpose))
            with suppress(ConnectionError):  # it may be closed before all of it is sent
                sock.sendall(mutated_greeting(draw, name) if purpose == "greeting" else mutated_stream(draw))
            read_to_end(sock)
            assert torch.equal(honest.submit(x).result(WAIT_S)[0], 2 * x[0]), f"the honest connection, beside case {number}"
    assert_given_back(begun_bytes, num_threads)


class Evil:
    """A listener in the place of a host: it proves the secret, and leaves the connections of a driver to the test."""

    def __init__(self) -> None:
        self._came: queue.Queue[tuple[str, socket.socket]] = queue.Queue()
        self.listener = Listener("127.0.0.1", SECRET, lambda sock, hello: self._came.put((hello[PURPOSE], sock)))

    @contextmanager
    def attacked(self, num_requests: int = 2) -> Iterator[tuple[HostsPipeline, list[Future[Any]], dict[str, socket.socket]]]:
        """A driver of this host with requests under way, and its connections by purpose."""
        with ExitStack() as stack:
            driver = stack.enter_context(pipeline(evil=self.listener))
            sockets = dict(self._came.get(timeout=WAIT_S) for _ in (CONTROL, ANSWERS, REQUESTS))
            for sock in sockets.values():
                stack.enter_context(sock)
            yield driver, [driver.submit(request(number)) for number in range(num_requests)], sockets


@pytest.fixture(scope="module")
def evil() -> Iterator[Evil]:
    host = Evil()
    yield host
    host.listener.close()


def test_no_mutated_stream_harms_a_driver(evil: Evil, honest: HostsPipeline) -> None:
    (begun_bytes, num_threads), x = in_use(), request(5)
    for number in range(NUM_CASES):
        draw = random.Random(f"driver {number}")
        with evil.attacked() as (driver, futures, sockets):
            sock = sockets[draw.choice((ANSWERS, ANSWERS, CONTROL, REQUESTS))]
            with suppress(ConnectionError):
                sock.sendall(mutated_stream(draw))
            read_to_end(sock)
            assert not concurrent.futures.wait(futures, WAIT_S).not_done, f"the requests of case {number} have no answer"
            with pytest.raises(AutosplitError, match="evil"):
                driver.submit(x).result(WAIT_S)
            assert torch.equal(honest.submit(x).result(WAIT_S)[0], 2 * x[0]), f"the honest connection, beside case {number}"
    assert_given_back(begun_bytes, num_threads)


@pytest.mark.parametrize(
    "purpose,sent,reason",
    [
        (ANSWERS, frame(REQUEST, 7, body=TENSOR), "it answered request 7, which it does not have"),
        (ANSWERS, frame(ERROR, 0, body=b"StageError\nno") + frame(REQUEST, 0, body=TENSOR), "it answered request 0, which"),
        (ANSWERS, frame(REQUEST, 0, body=TENSOR, variant=2), "it sent tensors of variant 2, and the last one is 1"),
        (ANSWERS, frame(REQUEST, 0, body=TENSOR, variant=2**16 - 1), "it sent tensors of variant 65535, and the last one is 1"),
        (ANSWERS, frame(REQUEST, 0, body=TENSOR[:8], variant=1), "it answered request 0 with tensors of variant 1, not 0"),
        (ANSWERS, frame(ERROR, 2**64 - 1), "it answered request -1, which it does not have"),  # read as a signed number
        (CONTROL, frame(BROKEN, body=b"c\nit is gone"), "it reported the loss of 'c', which is no host of this pipeline"),
        (REQUESTS, frame(CREDIT, 2**40), "it freed 1099511627776 slots, and 2 are taken"),
        (REQUESTS, frame(CREDIT, 0), "it freed 0 slots, and 2 are taken"),
        (REQUESTS, frame(ERROR, 0, body=b"no"), "it sent a frame of kind 1 to an end without slots"),
    ],
    ids=[
        "never sent",
        "answered twice",
        "no variant",
        "variant -1",
        "other size",
        "huge number",
        "unknown host",
        "credits",
        "no credit",
        "wrong way",
    ],
)
def test_a_driver_gives_a_host_up_that_breaks_a_rule_and_names_the_rule(
    evil: Evil, purpose: str, sent: bytes, reason: str
) -> None:
    """Answers to requests never sent were ignored, and so were credits for slots that were not taken."""
    with evil.attacked() as (_, futures, sockets):
        received = b""
        while len(received) < 2 * (HEADER.size + len(TENSOR)):
            received += sockets[REQUESTS].recv(1 << 16)
        sockets[purpose].sendall(sent)
        with pytest.raises(WorkerError, match=f"host 'evil' was lost: {reason}"):
            futures[1].result(WAIT_S)


@pytest.mark.parametrize("left_s", [1e308, 1e10, math.nan, math.inf, -1.0])
def test_a_deadline_that_no_clock_holds_closes_the_connection(agent: Agent, left_s: float) -> None:
    """1e308 s ended the reading thread alone: signs of life went on, and no later request was read."""
    with opened(agent, "one"), connect(agent, "one", ANSWERS), connect(agent, "one", REQUESTS) as sock:
        sock.sendall(frame(REQUEST, 1, left_s, body=TENSOR))
        assert is_closed(sock)


@pytest.mark.parametrize(
    "sent,reason",
    [
        (frame(CANCEL, 1, body=b"abc"), b"it sent 3 bytes with a frame of kind 2, which has none"),
        (frame(CREDIT, 1), b"it freed 1 slots, and 0 are taken"),
        (frame(BROKEN, body=b"c\nit is gone"), b"it reported a lost host to another host"),
        (frame(REQUEST, 1, body=TENSOR, variant=2), b"it sent tensors of variant 2, and the last one is 1"),
        (frame(REQUEST, 1, body=TENSOR, variant=2**16 - 1), b"it sent tensors of variant 65535, and the last one is 1"),
        (frame(REQUEST, 1, body=TENSOR, variant=1), b"it sent 16 bytes where 8 and a credit are due"),
    ],
    ids=["bytes with a cancellation", "credits to a receiver", "a report to a host", "no variant", "variant -1", "other size"],
)
def test_an_agent_gives_up_a_host_that_breaks_a_rule_and_serves_the_others(agent: Agent, sent: bytes, reason: bytes) -> None:
    with ExitStack() as stack:
        stack.enter_context(opened(agent, "one", ("evil", "good")))
        purposes = ((CONTROL, DRIVER), (ANSWERS, DRIVER), (REQUESTS, "evil"), (REQUESTS, "good"))
        control, answers, evil, good = (stack.enter_context(connect(agent, "one", *pair)) for pair in purposes)
        good.sendall(frame(REQUEST, 2, body=TENSOR))
        assert number_of_answer(answers) == 2
        evil.sendall(sent)
        assert is_closed(evil)
        report = control.recv(1 << 16)
        while b"evil\n" + reason not in report:
            report += control.recv(1 << 16)
        good.sendall(frame(REQUEST, 3, body=TENSOR))
        while number_of_answer(answers) != 3:
            pass


def test_answers_that_nobody_takes_fail_with_a_reason(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure was lost in a callback, and the request had no answer."""
    monkeypatch.setattr(runningsegment, "CONNECT_S", 0.1)
    with opened(agent, "one"), connect(agent, "one", CONTROL) as control, connect(agent, "one", REQUESTS) as sock:
        sock.sendall(frame(REQUEST, 1, body=TENSOR))
        assert is_closed(sock)
        report = b""
        while b"evil\nno connection to 'driver' was opened for its answers" not in report:
            report += control.recv(1 << 16)


def test_a_request_that_is_under_way_is_not_taken_again(agent: Agent) -> None:
    """The second one took the place of the first, which could not be cancelled any more."""
    gate = Gate()
    with opened(agent, "one", function=gate), connect(agent, "one", ANSWERS), connect(agent, "one", REQUESTS) as sock:
        sock.sendall(frame(REQUEST, 1, body=TENSOR) * 2)
        assert is_closed(sock)
        gate.opened.set()


def number_of_answer(sock: socket.socket) -> int:
    """The number of the next answer that comes."""
    while True:
        kind, _, _, number, _, num_bytes = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if kind == REQUEST:
            return int(number)


@pytest.mark.parametrize("num_slots", [math.inf, math.nan, -1, 0, 10**6, 10**200, True, "4", None, [4]], ids=repr)
def test_odd_numbers_of_slots_close_the_connection(agent: Agent, num_slots: Any) -> None:
    """Infinity ended the thread of the connection, which stayed open."""
    with opened(agent, "one"), connect(agent, "one", ANSWERS, num_slots=num_slots) as sock:
        assert is_closed(sock)


@pytest.mark.parametrize(
    "text", [b"[" * 60_000, b'{"a":' * 12_000, b"[]", b"\xff", b"9" * 5000, b""], ids=lambda text: repr(text[:5])
)
def test_a_greeting_that_is_no_mapping_closes_the_connection(agent: Agent, text: bytes) -> None:
    """60,000 brackets ended the thread of the connection, which stayed open."""
    with proved(agent) as sock:
        sock.sendall(struct.pack("<Q", len(text)) + text)
        assert is_closed(sock)


def test_each_place_at_a_segment_is_taken_once_and_by_whom_it_is_for(agent: Agent) -> None:
    """A second connection took the place of the first, whose requests then had no answer."""
    with opened(agent, "one"), ExitStack() as stack:
        first = [stack.enter_context(connect(agent, "one", purpose)) for purpose in (CONTROL, ANSWERS, REQUESTS)]
        for purpose, sender in ((CONTROL, DRIVER), (ANSWERS, DRIVER), (REQUESTS, "evil"), (REQUESTS, "stranger")):
            with connect(agent, "one", purpose, sender) as second:
                assert is_closed(second)
        first[2].sendall(frame(REQUEST, 1, body=TENSOR))
        assert number_of_answer(first[1]) == 1


def test_errors_in_bytes_that_are_no_text_do_not_grow_on_their_way(agent: Agent) -> None:
    """Each of them became three bytes, so the next host got a text above the limit, and gave up an honest connection."""
    with opened(agent, "one"), connect(agent, "one", ANSWERS) as answers, connect(agent, "one", REQUESTS) as sock:
        sock.sendall(frame(ERROR, 1, body=b"\xff" * 65_536))
        kind = BEAT
        while kind == BEAT:
            kind, _, _, number, _, num_bytes = HEADER.unpack(answers.recv(HEADER.size, socket.MSG_WAITALL))
        assert (kind, number) == (ERROR, 1) and num_bytes <= 65_536


def test_errors_that_the_next_host_does_not_take_close_the_connection(agent: Agent) -> None:
    """They had no limit, and each of them holds up to 64 KB of memory."""
    with opened(agent, "one"), connect(agent, "one", ANSWERS), connect(agent, "one", REQUESTS) as sock:
        sock.settimeout(WAIT_S)
        with pytest.raises(ConnectionError):
            for number in range(5000):
                sock.sendall(frame(ERROR, number, body=bytes(20_000)))
