"""Handshake: two hosts connect, prove that they know the secret of the run, and say what the connection is for.

::

    dials     random number   proof   greeting
    listens   random number   proof
"""

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

from autosplit.clusters.frames import reason_of, receive_into, receive_text
from autosplit.errors import WorkerError

CONNECT_S = 10.0
"""Seconds for connecting and for proving the secret."""

NONCE_BYTES = 32
BUFFER_BYTES = 4 << 20
"""Bytes of a socket's buffers that are asked for; the kernel may give less."""


def dial(address: tuple[str, int], secret: bytes, hello: Mapping[str, Any]) -> socket.socket:
    """Connect to a listener, prove the secret, and say what the connection is for.

    Raises: WorkerError: nobody listens there, or the listener does not know the secret.
    """
    try:
        sock = socket.create_connection(address, timeout=CONNECT_S)
        try:
            _enlarge(sock)
            _prove(sock, secret, mine=b"dials", theirs=b"listens")
            text = json.dumps(hello).encode()
            sock.sendall(struct.pack("<Q", len(text)) + text)
        except BaseException:
            sock.close()
            raise
    except OSError as failure:
        raise WorkerError(f"no connection to {address[0]}:{address[1]}: {reason_of(failure, CONNECT_S)}") from None
    return sock


def welcome(sock: socket.socket, secret: bytes) -> dict[str, Any]:
    """The listener's part of ``dial``: what the connection is for. Raises: OSError, ValueError: the other end is a stranger."""
    sock.settimeout(CONNECT_S)
    _enlarge(sock)
    _prove(sock, secret, mine=b"listens", theirs=b"dials")
    size = memoryview(bytearray(8))
    receive_into(sock, size)
    hello = json.loads(receive_text(sock, struct.unpack("<Q", size)[0]))
    if not isinstance(hello, dict):
        raise ValueError("the greeting is not a mapping")
    return hello


def _prove(sock: socket.socket, secret: bytes, mine: bytes, theirs: bytes) -> None:
    """Exchange random numbers, and answer the other end's with a keyed hash of both; the two ends hash different words."""
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own)
    other, proof = memoryview(bytearray(NONCE_BYTES)), memoryview(bytearray(32))
    receive_into(sock, other)
    first, second = (own, bytes(other)) if mine == b"dials" else (bytes(other), own)
    sock.sendall(hmac.digest(secret, mine + first + second, "sha256"))
    receive_into(sock, proof)
    if not hmac.compare_digest(bytes(proof), hmac.digest(secret, theirs + first + second, "sha256")):
        raise ConnectionError("the other end does not know the secret of this run")


def _enlarge(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
