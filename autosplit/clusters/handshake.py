"""Handshake: two hosts connect, prove that they know the secret of the run, and name the purpose of the connection.

::

    dials     random number   proof   greeting
    listens   random number   proof              let in
"""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from autosplit.clusters.sockets import reason_of, receive_into, receive_text, seconds_until
from autosplit.errors import WorkerError
from autosplit.parsing import parse_json

CONNECT_S = 10.0
"""Seconds for connecting and for the whole handshake, for the end that dials."""

PROOF_S = 5.0
"""Seconds for the whole handshake, for the end that listens."""

RETRY_S = 0.02
"""Seconds between two attempts to connect, where a listener closed the connection to make room for a newer one."""

NONCE_BYTES = 32
LET_IN = b"\1"
"""The listener's last word: it will not close the connection any more to make room."""

BUFFER_BYTES = 4 << 20
"""Bytes of a socket's buffers that are asked for; the kernel may give less."""


def dial(address: tuple[str, int], secret: bytes, hello: Mapping[str, Any]) -> socket.socket:
    """Connect to a listener, prove the secret, and name the purpose of the connection.

    Raises: WorkerError: no process listens there, or the listener does not prove the secret within ``CONNECT_S``.
    """
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection(address, timeout=seconds_until(until_s))
            try:
                return _prove_and_greet(sock, secret, until_s, hello)
            except BaseException:
                sock.close()
                raise
        except OSError as failure:
            crowded = isinstance(failure, ConnectionError) and not isinstance(failure, ConnectionRefusedError)
            if not crowded or time.monotonic() + RETRY_S > until_s:
                late = isinstance(failure, TimeoutError)
                reason = f"the handshake took longer than {CONNECT_S:g} s" if late else reason_of(failure, CONNECT_S)
                raise WorkerError(f"no connection to {address[0]}:{address[1]}: {reason}") from None
            time.sleep(RETRY_S)


def _prove_and_greet(sock: socket.socket, secret: bytes, until_s: float, hello: Mapping[str, Any]) -> socket.socket:
    _prove(sock, secret, until_s, mine=b"dials", theirs=b"listens")
    text = json.dumps(hello).encode()
    sock.sendall(struct.pack("<Q", len(text)) + text)
    receive_into(sock, memoryview(bytearray(len(LET_IN))), until_s)
    _enlarge(sock)
    return sock


def welcome(sock: socket.socket, secret: bytes) -> dict[str, Any]:
    """The listener's part of ``dial``: returns the purpose of the connection. The listener then sends ``LET_IN``.

    Raises: OSError: the other end does not prove the secret within ``PROOF_S``. ValueError: its greeting is malformed.
    """
    until_s = time.monotonic() + PROOF_S
    _prove(sock, secret, until_s, mine=b"listens", theirs=b"dials")
    size = memoryview(bytearray(8))
    receive_into(sock, size, until_s)
    hello = parse_json(receive_text(sock, struct.unpack("<Q", size)[0], until_s))
    if not isinstance(hello, dict):
        raise ValueError("the greeting is not a mapping")
    _enlarge(sock)  # only a caller that proved the secret gets large buffers
    return hello


def _prove(sock: socket.socket, secret: bytes, until_s: float, mine: bytes, theirs: bytes) -> None:
    """Exchange random numbers, and answer the other end's with a keyed hash of both; the two ends hash different words."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its small messages do not wait for acknowledgements
    sock.settimeout(seconds_until(until_s))
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own)
    other, proof = memoryview(bytearray(NONCE_BYTES)), memoryview(bytearray(32))
    receive_into(sock, other, until_s)
    first, second = (own, bytes(other)) if mine == b"dials" else (bytes(other), own)
    sock.sendall(hmac.digest(secret, mine + first + second, "sha256"))
    receive_into(sock, proof, until_s)
    if not hmac.compare_digest(bytes(proof), hmac.digest(secret, theirs + first + second, "sha256")):
        raise PermissionError("the other end does not know the secret of this run")


def _enlarge(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
