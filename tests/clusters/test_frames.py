"""Connections between two ends in this process: layouts, credits, proofs, and how an end learns that the other one is gone."""

import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from autosplit.clusters import frames, handshake, hostlinks, runningsegment
from autosplit.clusters.fleet import Fleet
from autosplit.clusters.frames import CANCEL, CREDIT, ERROR, REQUEST, Connection, Frame, FrameBuffer, Outgoing, Receiver
from autosplit.clusters.handshake import LET_IN, dial, welcome
from autosplit.clusters.runningsegment import RunningSegment
from autosplit.clusters.segments import Segment
from autosplit.errors import WorkerError
from autosplit.tracing.tensorspec import spec_of
from autosplit.values.links import Link, Wire

SECRET = b"secret of the run"
WAIT_S = 30.0


class Log(Receiver):
    """Notes what comes."""

    def __init__(self) -> None:
        self.came: queue.Queue[Any] = queue.Queue()

    def request(self, connection: Connection, frame: Frame, slot: FrameBuffer) -> None:
        self.came.put((frame, [tensor.clone() for tensor in slot.tensors(frame.variant)], slot))

    def error(self, connection: Connection, frame: Frame, text: str) -> None:
        self.came.put((frame.number, text))

    def cancel(self, connection: Connection, frame: Frame) -> None:
        self.came.put(frame.number)

    def lost(self, connection: Connection, reason: str) -> None:
        self.came.put(reason)

    def next(self) -> Any:
        return self.came.get(timeout=WAIT_S)


@contextmanager
def ends(values: list[torch.Tensor], num_slots: int) -> Iterator[tuple[Connection, Connection, Log, Log]]:
    """A sender and a receiver, and what each hears."""
    specs = [spec_of(f"value{number}", value) for number, value in enumerate(values)]
    one, two = _tcp_pair()
    logs = Log(), Log()
    sender = Connection(one, "there", logs[0], [specs], num_credits=num_slots)
    receiver = Connection(two, "here", logs[1], [specs], num_slots=num_slots)
    try:
        yield sender, receiver, *logs
    finally:
        sender.close()
        receiver.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(4.0).expand(3, 4),
        torch.arange(12, dtype=torch.int16)[::2],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3_000_000),
    ],
    ids=["transposed", "expanded", "strided", "scalar", "empty", "bool", "conjugated", "12 MB"],
)
def test_tensors_keep_their_values_and_strides(value: torch.Tensor) -> None:
    with ends([value, torch.ones(2)], num_slots=1) as (sender, _, _, log):
        sender.post(Outgoing(REQUEST, 7, priority=-2, tensors=[value, torch.ones(2)]))
        frame, [found, other], slot = log.next()
    assert (frame.number, frame.priority, frame.left_s) == (7, -2, 0.0)
    assert torch.equal(found, value) and torch.equal(other, torch.ones(2))
    assert slot.tensors(0)[0].stride() == value.stride()


def test_a_sender_waits_for_credits_and_says_other_things_meanwhile() -> None:
    with ends([torch.zeros(1)], num_slots=2) as (sender, receiver, _, log):
        for number in range(3):
            sender.post(Outgoing(REQUEST, number, tensors=[torch.full((1,), float(number))]))
        slots = [log.next()[2] for _ in range(2)]
        with pytest.raises(queue.Empty):
            log.came.get(timeout=0.05)
        receiver.release(slots[0])
        assert log.next()[0].number == 2
        sender.post(Outgoing(ERROR, 3, text=b"StageError\nwrong"))
        sender.post(Outgoing(CANCEL, 1))
        assert [log.next(), log.next()] == [(3, "StageError\nwrong"), 1]


def test_the_other_end_hears_at_once_that_one_is_gone() -> None:
    with ends([torch.zeros(1)], num_slots=1) as (sender, _, _, log):
        sender.close()
        assert "closed the connection" in log.next()


def test_a_silent_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SILENCE_S", 0.2)
    one, two = _tcp_pair()
    log = Log()
    connection = Connection(one, "there", log)
    assert log.next() == "it was silent for 0.2 s"
    connection.close()
    two.close()


def test_a_live_end_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SILENCE_S", 1.0)
    monkeypatch.setattr(frames, "BEAT_S", 0.05)
    with ends([torch.zeros(1)], num_slots=1) as (sender, _, mine, log):
        with pytest.raises(queue.Empty):
            log.came.get(timeout=1.2)
        sender.post(Outgoing(CANCEL, 1))
        assert log.next() == 1
        assert mine.came.empty()


def test_more_than_was_agreed_ends_the_connection() -> None:
    with ends([torch.zeros(1)], num_slots=1) as (sender, _, _, log):
        sender._credits = 5  # a sender that does not wait for any
        for number in range(2):
            sender.post(Outgoing(REQUEST, number, tensors=[torch.zeros(1)]))
        log.next()
        assert "a credit are due" in log.next()


def test_an_answer_comes_before_the_credits_that_go_with_it() -> None:
    """The other end read the credits first, which kept whoever waited for the answer."""
    one, two = _tcp_pair()
    log = Log()
    receiver = Connection(two, "here", log, [[spec_of("value", torch.zeros(1))]], num_slots=4)
    with one:
        one.sendall(header(REQUEST, 4) + bytes(4))
        frame, _, slot = log.next()
        receiver.release(slot)
        receiver.post(Outgoing(CANCEL, frame.number))
        size, sent = len(header(CANCEL)), b""
        while len(sent) < 2 * size:
            sent += one.recv(2 * size - len(sent))
        assert [Frame(*frames._HEADER.unpack(sent[at : at + size])).kind for at in (0, size)] == [CANCEL, CREDIT]
        receiver.close()


def header(kind: int, num_bytes: int = 0, number: int = 0, left_s: float = 0.0, variant: int = 0) -> bytes:
    return frames._HEADER.pack(*Frame(kind, variant, number=number, left_s=left_s, num_bytes=num_bytes))


@pytest.mark.parametrize(
    "sent,reason",
    [
        (header(REQUEST, 4, variant=1), "it sent tensors of variant 1, and the last one is 0"),
        (header(REQUEST, 4, variant=2**16 - 1), "it sent tensors of variant 65535, and the last one is 0"),
        (header(CANCEL, variant=1), "it sent tensors of variant 1, and the last one is 0"),
        (header(REQUEST, 12), "it sent 12 bytes where 4 and a credit are due"),
        (header(ERROR, 1 << 40), "it sent a text of 1099511627776 bytes, and 65536 are allowed"),
        (header(77), "it sent a frame of kind 77, which does not exist"),
        (header(CANCEL, 3), "it sent 3 bytes with a frame of kind 2, which has none"),
        (header(CREDIT, number=1), "it freed 1 slots, and 0 are taken"),
        (header(REQUEST, 4, left_s=1e308), "it sent a deadline in 1e+308 s, and 0 to 4.61169e+09 s are allowed"),
        (header(CANCEL, left_s=math.nan), "it sent a deadline in nan s, and 0 to 4.61169e+09 s are allowed"),
        (header(CANCEL, left_s=-1.0), "it sent a deadline in -1 s, and 0 to 4.61169e+09 s are allowed"),
        (header(REQUEST, 4) + b"ab", "it closed the connection"),
        (header(REQUEST, 4)[:9], "it closed the connection"),
    ],
    ids=[
        "unknown variant",
        "last variant of the header",
        "variant of a cancellation",
        "wrong length",
        "long text",
        "unknown kind",
        "bytes of a cancellation",
        "credits",
        "late",
        "nan",
        "past",
        "cut off in a tensor",
        "cut off in a header",
    ],
)
def test_what_is_malformed_ends_the_connection_and_is_no_request(sent: bytes, reason: str) -> None:
    one, two = _tcp_pair()
    log = Log()
    connection = Connection(two, "here", log, [[spec_of("value", torch.zeros(1))]], num_slots=2)
    with one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        assert log.next() == reason
    assert log.came.empty()
    connection.close()


def test_a_failing_receiver_ends_its_connection_with_the_reason() -> None:
    """Only errors of the socket did. After another one the reading thread was gone, and signs of life went on."""

    class Failing(Log):
        def cancel(self, connection: Connection, frame: Frame) -> None:
            raise ZeroDivisionError(f"request {frame.number}")

    one, two = _tcp_pair()
    log = Failing()
    connection = Connection(two, "here", log, num_slots=1)
    with one:
        one.sendall(header(CANCEL, number=3))
        assert log.next() == "the connection failed with ZeroDivisionError: request 3"
        assert one.recv(1) == b""
    connection.close()


def test_a_frame_that_cannot_be_sent_ends_the_connection_and_not_its_caller() -> None:
    with ends([torch.zeros(1)], num_slots=1) as (sender, _, mine, log):
        sender.post(Outgoing(REQUEST, 1, tensors=[]))
        assert mine.next().startswith("the connection failed with ValueError: zip()")
        assert log.next() == "it closed the connection"


def test_priorities_beyond_the_header_are_the_most_urgent_or_the_least() -> None:
    """They raised struct.error in submit, and the request had no answer."""
    with ends([torch.zeros(1)], num_slots=2) as (sender, _, _, log):
        for priority in (2**40, -(2**80)):
            sender.post(Outgoing(REQUEST, 1, priority=priority, tensors=[torch.zeros(1)]))
        assert [log.next()[0].priority for _ in range(2)] == [2**31 - 1, -(2**31) + 1]


@pytest.mark.parametrize(
    "sent,reason",
    [(b"", "it closed the connection"), (bytes(8), "it does not confirm the 4096 bytes")],
    ids=["closed", "wrong size"],
)
@pytest.mark.parametrize(
    "measured", [lambda sock: hostlinks.measure_link("a", "b", sock), hostlinks.flood], ids=["link", "flood"]
)
def test_a_link_that_breaks_while_it_is_measured_is_named(
    measured: Callable[[socket.socket], Any], sent: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OSError and a traceback came out of the cluster, without the host."""
    monkeypatch.setattr(hostlinks, "MEDIUM_BYTES", 4096)
    one, two = _tcp_pair()
    with two:
        two.sendall(sent)
        two.shutdown(socket.SHUT_WR)
        with pytest.raises(WorkerError, match=rf"the connection to 127\.0\.0\.1:\d+ could not be measured: {reason}"):
            measured(one)


@pytest.mark.parametrize("theirs,fits", [(SECRET, True), (b"another", False)])
def test_both_ends_prove_that_they_know_the_secret(theirs: bytes, fits: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[Any] = []

        def listen() -> None:
            sock, _ = listener.accept()
            with sock:
                try:
                    heard.append(welcome(sock, SECRET))
                    sock.sendall(LET_IN)
                except OSError as failure:
                    heard.append(failure)

        thread = threading.Thread(target=listen)
        thread.start()
        address = listener.getsockname()
        if fits:
            dial(address, theirs, {"purpose": "requests"}).close()
        else:
            with pytest.raises(WorkerError, match="does not know the secret"):
                dial(address, theirs, {"purpose": "requests"})
        thread.join(WAIT_S)
    assert heard == [{"purpose": "requests"}] if fits else isinstance(heard[0], OSError)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(WorkerError, match="connection refused"):
        dial(address, SECRET, {})


def test_a_silent_listener_is_given_up_and_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(WorkerError, match=r"the handshake took longer than 0\.1 s"),
    ):
        dial(listener.getsockname(), SECRET, {})


def test_a_listener_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read had the whole time limit."""
    monkeypatch.setattr(handshake, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock, suppress(ConnectionError):
                for _ in range(63):
                    sock.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(WorkerError, match=r"the handshake took longer than 0\.3 s"):
            dial(listener.getsockname(), SECRET, {})
        thread.join()


@pytest.mark.parametrize("s_per_byte", [1e-9, 1.6e-6], ids=["8 Gbit/s", "5 Mbit/s"])
def test_a_slow_link_is_measured_without_payloads_that_take_long(s_per_byte: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large payload takes 7 s at 5 Mbit/s, longer than a socket waited then: no cluster with such a link could be opened."""
    sent: list[int] = []

    def trips_s(sock: socket.socket, num_bytes: int) -> list[float]:
        sent.append(num_bytes)
        return [2e-4 + num_bytes * s_per_byte] * 3

    monkeypatch.setattr(hostlinks, "_trips_s", trips_s)
    one, two = _tcp_pair()
    link, wire = hostlinks.measure_link("a", "b", one)
    two.close()
    assert wire.s_per_byte == pytest.approx(s_per_byte)
    assert link.latency_s == pytest.approx((2e-4 + 4096 * s_per_byte) / 2)
    assert sum(sent) * s_per_byte < 5


def test_the_drivers_card_carries_what_it_sends_to_all_hosts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host takes 100 B/s, and the driver sends to both at once: two replicas are not bound by the rate of one."""
    opened = object.__new__(Fleet)
    opened.hosts, opened._lost = dict.fromkeys("ab"), {}  # type: ignore[assignment, arg-type]

    def measured(source: str, target: str, *others: object) -> tuple[Link, Wire]:
        return Link(source, target, 1e-4, 0.0, 0.0, 0.0, 0.0), Wire(f"{source} to {target}", (source,), (target,), 0.01)

    monkeypatch.setattr(hostlinks, "measure_link", measured)
    monkeypatch.setattr(hostlinks, "flood", lambda sock: 100.0)
    for name, found in {
        "_probe": lambda name: None,
        "ask": lambda calls: [measured("a", "b")],
        "address": lambda name: None,
    }.items():
        monkeypatch.setattr(opened, name, found, raising=False)
    _, wires = opened._measure_network()
    s_per_byte = {wire.name: wire.s_per_byte for wire in wires}
    assert s_per_byte["host sends"] == s_per_byte["host receives"] == pytest.approx(0.005)
    assert s_per_byte["a receives"] == s_per_byte["b receives"] == 0.01


def test_an_answer_waits_for_the_connection_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request may be quicker than the thread that lets the connection in. Its answer was lost, and its caller hung."""
    monkeypatch.setattr(runningsegment, "Pipeline", lambda *given, **settings: None)
    segment = RunningSegment("b", Segment("one", (), ("b",), ((),), ((),), 1))
    one, two = _tcp_pair()
    log = Log()
    driver = Connection(two, "b", log, num_slots=1)
    late = threading.Timer(0.2, segment.send_to, ("", one, 1))
    late.start()
    segment.error(driver, Frame(ERROR, number=3), "it failed")
    assert log.came.get(timeout=WAIT_S) == (3, "it failed")
    late.join()
    driver.close()
    segment._targets[""].close()
