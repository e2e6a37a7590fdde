"""A listener among strangers: silent ones, slow ones, floods of them, and a system that has nothing left to give."""

import errno
import hmac
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from autosplit.children import python_running
from autosplit.clusters import handshake
from autosplit.clusters.handshake import dial
from autosplit.clusters.listener import MAX_UNPROVED, Listener

SECRET = b"secret of the run"
WAIT_S = 10.0

CHILD = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from autosplit.clusters.listener import Listener
def serve(sock, hello):
    sock.sendall(bytes([threading.active_count()]))
    sock.close()
listener = Listener("127.0.0.1", b"secret of the run", serve)
print(listener.address[1], flush=True)
sys.stdin.read()
"""
"""A process with a limit on descriptors. An honest host that was let in is told the number of threads."""


def ask(sock: socket.socket) -> bytes:
    """What a served connection is told."""
    with sock:
        sock.settimeout(WAIT_S)
        return sock.recv(1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener("127.0.0.1", SECRET, greet)
    yield opened
    opened.close()


def greet(sock: socket.socket, hello: dict[str, Any]) -> None:
    sock.sendall(b"h")
    sock.close()


@pytest.mark.parametrize("most_files,num_strangers", [(32, 100), (256, 128)], ids=["no descriptor left", "no place left"])
def test_honest_hosts_get_in_among_silent_strangers(most_files: int, num_strangers: int) -> None:
    """Once no descriptor was left, the listener ended for good; and each stranger had a thread."""
    command, pipe = python_running(CHILD, str(most_files)), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child, ExitStack() as strangers:
        assert child.stdin is not None and child.stdout is not None
        address = ("127.0.0.1", int(child.stdout.readline()))
        for _ in range(num_strangers):
            strangers.enter_context(socket.create_connection(address, WAIT_S))
        num_threads = [*ask(dial(address, SECRET, {}))]
        strangers.close()
        num_threads += ask(dial(address, SECRET, {}))
        child.stdin.close()
    assert len(num_threads) == 2 and max(num_threads) <= 2 + min(most_files, MAX_UNPROVED)


def test_the_oldest_stranger_makes_room_for_the_newest(listener: Listener) -> None:
    with ExitStack() as open_ones:
        strangers = [open_ones.enter_context(socket.create_connection(listener.address, WAIT_S)) for _ in range(MAX_UNPROVED)]
        for stranger in strangers:
            assert len(stranger.recv(32)) == 32, "it is served"
        newest = open_ones.enter_context(socket.create_connection(listener.address, WAIT_S))
        assert strangers[0].recv(1) == b""
        assert len(newest.recv(32)) == 32


@pytest.mark.parametrize("part", ["random number", "proof", "greeting"])
def test_the_whole_handshake_has_one_time_limit(listener: Listener, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read had 10 s, so a byte every 2 s held a connection and its thread for minutes."""
    monkeypatch.setattr(handshake, "PROOF_S", 0.3)
    own = bytes(32)
    with socket.create_connection(listener.address, WAIT_S) as slow, pytest.raises(ConnectionError):
        if part != "random number":
            slow.sendall(own)
        if part == "greeting":
            other = slow.recv(32)
            slow.sendall(hmac.digest(SECRET, b"dials" + own + other, "sha256") + struct.pack("<Q", 60))
        for _ in range(31):
            slow.sendall(b"\0")
            threading.Event().wait(0.05)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO])
def test_no_error_of_the_system_ends_it(listener: Listener, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, iter([number] * 3)

    def failing(sock: socket.socket) -> Any:
        for one in failures:
            raise OSError(one, "the system refused")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(2):  # the first one was accepted by the call that waits already
        assert ask(dial(listener.address, SECRET, {})) == b"h"
    assert next(failures, None) is None


def test_no_thread_left_is_no_end_either(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, iter([1, 2])

    def failing(thread: threading.Thread) -> None:
        for _ in failures:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    assert ask(dial(listener.address, SECRET, {})) == b"h", "a host whose connection was closed dials again"
    assert next(failures, None) is None


def test_an_error_of_the_purpose_closes_the_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    def serve(sock: socket.socket, hello: dict[str, Any]) -> None:
        raise ZeroDivisionError(f"nothing to do for {hello['sender']}")

    listener = Listener("127.0.0.1", SECRET, serve)
    for _ in range(2):
        assert ask(dial(listener.address, SECRET, {"sender": "b"})) == b""
    assert "a connection was closed: ZeroDivisionError: nothing to do for b" in caplog.text
    listener.close()


def test_its_end_ends_strangers_and_its_thread(listener: Listener) -> None:
    with socket.create_connection(listener.address, WAIT_S) as stranger:
        assert len(stranger.recv(32)) == 32
        listener.close()
        assert stranger.recv(1) == b""
    assert not [thread for thread in threading.enumerate() if thread.name == "autosplit-listener"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.address, WAIT_S)
